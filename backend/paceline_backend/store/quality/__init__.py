"""Quality of a run's model, and the time that the run takes to reach it.

`telemetry.handlers` writes what ranks report: metrics of their steps (`MetricBatch`) and results of
the script on held-out data (`Evaluation`). `evaluations` and `metrics` read these values, combined
over ranks. `target` finds when a run met the operator's target.
"""
