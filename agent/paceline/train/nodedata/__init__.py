"""A rank's part in data that lives on nodes.

- `settling`: which ranks share a directory, and what nodes have when a session begins;
- `node`: a rank's data on its node: what batches missed, and what is told of an epoch.

    data = settle(dataset, meeting, environment)  # None unless it is `paceline.data.Sharded`
"""
