"""What a step may contain: sizes of samples, token budgets and limits, and packed sequences."""
