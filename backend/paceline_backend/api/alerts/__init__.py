"""REST: alerts, alert rules, and webhooks that receive alerts."""
