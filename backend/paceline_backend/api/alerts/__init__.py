"""REST: alerts, their rules, and webhooks that are told of them."""
