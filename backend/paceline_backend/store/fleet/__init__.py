"""State that is kept across all runs: the history of verdicts, and the progress of runs.

`verdicts` has one row for each period in which a run's verdict named the same causes. The rows show
which node slowed down runs at which time. `progress` records the newest step of each run, and when
it was reached.

One worker process writes the rows (`control.fleet`); `insight.fleet`, `insight.alerts` and `api`
read them. Rows of verdicts outlive the runs that they are about.
"""
