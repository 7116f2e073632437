"""REST: training backends, and the nodes that engines start."""
