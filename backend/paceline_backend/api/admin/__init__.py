"""What only administrators change: the control plane itself, not a run."""
