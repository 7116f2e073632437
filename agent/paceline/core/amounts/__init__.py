"""Limits and counts of batches.

`budget` limits steps by tokens instead of samples, `shapes` rounds counts of samples to a grid,
`trained` counts the samples that a run has trained on, and `devices` compares the ranks' speeds by
their devices.
"""
