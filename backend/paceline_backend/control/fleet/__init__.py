"""What one worker does for all runs: keeps verdicts, progress, and the time spent waiting."""
