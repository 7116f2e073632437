"""REST: the verdict over all runs, nodes by day, and the cost of waiting."""
