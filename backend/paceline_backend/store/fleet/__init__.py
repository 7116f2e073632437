"""State that is kept across all runs: the history of verdicts, and the progress of runs.

`verdicts` has one row for each period in which a run's verdict named the same causes; a row is kept
after its run is deleted. `progress` records the newest step of each run, and when it was reached.
"""
