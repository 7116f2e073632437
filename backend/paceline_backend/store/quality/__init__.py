"""How good a run's model is, and how long the run takes to become so good.

`writing` stores what ranks report: metrics of their steps (`MetricBatch`), and what the script
measured on held-out data (`Evaluation`). `evaluations` and `metrics` read them, combined over
ranks. `target` says when a run met what its operator wants of it, and `completion` when a run will
end, or how long it took.

Ingest writes, `runs` shows the summary of each run, and `insight` and `api` read the rest.
"""
