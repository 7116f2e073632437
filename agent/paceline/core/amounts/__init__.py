"""How much ranks get, have done and can do.

`budget` makes steps of so many tokens, `shapes` puts counts of samples on a grid, `trained` counts
the samples that a run has trained on,
`devices` says what ranks can do relative to each other.
"""
