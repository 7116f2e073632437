"""REST: what a run's script measures, and what its operator wants of the model.

`routes` answers, `models` has the bodies.
"""
