"""What runs in a rank: the session, its loader, plans and gradients."""
