"""What is remembered over all runs: verdicts as they changed, and progress.

`verdicts` has a row for each verdict of a run from when it was first made until it changed, so it
tells when which node held runs up. `progress` says how far each run has come, and when that was
seen.

One worker writes (`control.fleet`), and `insight.fleet`, `insight.alerts` and `api` read. Rows of
verdicts outlast the runs that they are about.
"""
