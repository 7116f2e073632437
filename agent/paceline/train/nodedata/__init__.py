"""A rank's part in data that lives on nodes.

- `settling`: which ranks share a directory, and which samples nodes have at a session's start;
- `node`: a rank's data on its node: which samples its batches missed, and records of each epoch.
    data = settle(dataset, meeting, environment)  # None unless it is `paceline.data.Sharded`
"""
