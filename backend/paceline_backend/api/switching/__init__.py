"""REST: the policy of a run, who switched it and why, and what each switch changed.

`routes` answers, `models` has the bodies. A switch itself is made by `requests.switch`.
"""
