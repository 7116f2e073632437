"""REST: cordons of nodes, and what is known of a node's past."""
