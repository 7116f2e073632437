"""Limits on the contents of a step: sizes, a token budget, memory, and packed sequences."""
