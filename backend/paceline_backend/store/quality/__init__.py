"""How good a run's model is, and how long the run takes to become so good.

`telemetry.quality` writes what ranks report: metrics of their steps (`MetricBatch`), and what the
script measured on held-out data (`Evaluation`). `evaluations` and `metrics` read them, combined
over ranks. `target` says when a run met what its operator wants of it, and `completion` when a run
will end, or how long it took.

`runs` shows the summary of each run; `insight` and `api` read the rest.
"""
