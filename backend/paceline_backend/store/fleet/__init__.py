"""What is remembered over all runs: verdicts as they changed, progress, and time spent waiting.

`verdicts` has a row for each verdict of a run from when it was first made until it changed, so it
tells when which node held runs up. `progress` says how far each run has come, and when that was
seen. `waiting` adds up the ranks' time and the time that they wait, by run, node and day. `prices`
keeps what nodes cost, and `costs` says what that time cost.

One worker writes (`control.fleet`), and `insight.fleet`, `insight.alerts` and `api` read. Rows of
verdicts and waiting outlast the runs that they are about.
"""
