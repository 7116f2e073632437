"""State that is kept across all runs: the history of verdicts, and the progress of runs.

`verdicts` has one row for each verdict of a run, from its first evaluation until it changed. The
rows show which node slowed down runs at which time. `progress` records how far each run has come,
and when.

One worker process writes (`control.fleet`); `insight.fleet`, `insight.alerts` and `api` read. Rows
of verdicts outlive the runs that they are about.
"""
