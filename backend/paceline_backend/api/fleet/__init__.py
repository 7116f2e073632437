"""REST: the verdict over all runs, nodes by day, and what waiting costs."""
