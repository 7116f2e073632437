"""REST of history: past and present runs, and all that is stored about them.

- `listing`: runs that match `filters`, sorted and paged.
- `labels`: tags and notes.
- `aggregates`: sums over runs, grouped by node, day and so on.
- `details`: epochs, samples, devices, forecasts and verdicts of one run.
- `export`: a run's tables as CSV, NDJSON or Parquet, streamed.
- `compare`: runs, or parts of runs, side by side with confidence intervals.
"""
