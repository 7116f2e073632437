"""Alerts: `watch` raises and resolves them, `sender` delivers them to webhooks."""
