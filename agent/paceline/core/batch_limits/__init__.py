"""Limits on the sizes of batches, and speeds of ranks from which batch sizes follow.

`budget` limits steps by tokens instead of samples, `shapes` rounds counts of samples to multiples
of a number, and `devices` compares the ranks' speeds by their devices.
"""
