"""REST: the policy of a run, who switched it and why, and what each switch changed.

`routes` has the routes, `models` the bodies. `requests.switch` makes the switch itself.
"""
