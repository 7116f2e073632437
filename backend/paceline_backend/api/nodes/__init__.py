"""REST: cordons and checks of nodes, and the history of a node."""
