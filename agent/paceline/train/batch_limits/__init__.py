"""Limits on the contents of a step: numbers of samples, token budgets, and packed sequences."""
