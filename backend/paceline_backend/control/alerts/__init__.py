"""Alerts: `watch` raises and resolves them, `sender` tells webhooks."""
