"""Work that one worker does for all runs: storing verdicts and progress."""
