"""REST of history: what ran, when, where, how well; and all that is stored of a run.

- `listing`: runs by any of `filters`, sorted and paged.
- `labels`: tags and notes.
- `aggregates`: sums over runs, nodes, days.
- `details`: epochs, samples, devices, forecasts and verdicts of one run.
- `export`: a run's tables as CSV, NDJSON or Parquet, streamed.
- `compare`: runs, or parts of runs, side by side with intervals.
"""
