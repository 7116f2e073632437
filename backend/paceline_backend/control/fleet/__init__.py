"""What one worker does for all runs: keeps verdicts and progress."""
