"""What runs on a node beside the ranks: agent, supervisor, delivery. No torch."""
