"""Limits and counts of batches.

`budget` limits steps by tokens instead of samples, `shapes` rounds counts of samples to multiples
of a number, and `devices` compares the ranks' speeds by their devices.
"""
