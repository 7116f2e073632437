"""Contents of a step: the sizes of samples, token budgets and limits, and packed sequences."""
