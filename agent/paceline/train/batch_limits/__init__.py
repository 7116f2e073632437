"""Limits on the contents of a step: sizes, a token budget, and packed sequences."""
