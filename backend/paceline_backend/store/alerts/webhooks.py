"""Webhooks: the receivers of alerts.

`get` and `delete` raise `UnknownWebhookError` if there is no webhook with this id.
"""

from __future__ import annotations

import secrets
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.alerts.tables import alert_deliveries, webhooks
from paceline_backend.store.database import now

# In ascending order.
SEVERITIES = ("info", "warning", "critical")


class UnknownWebhookError(PacelineError):
    """No webhook has this id."""


def listed(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return all webhooks, oldest first, each with the result of its newest delivery."""
    d = alert_deliveries.c
    others = alert_deliveries.alias()
    newest = sa.select(sa.func.max(others.c.key)).where(others.c.webhook == webhooks.c.key)
    last = (d.tries, d.tried_at, d.sent_at, d.due_at, d.status, d.error)
    joined = webhooks.outerjoin(alert_deliveries, d.key == newest.scalar_subquery())
    query = sa.select(webhooks, *last).select_from(joined)
    rows = connection.execute(query.order_by(webhooks.c.key)).mappings()
    return [dict(row) for row in rows]


def get(connection: sa.Connection, webhook: str) -> dict[str, Any]:
    """Return a webhook in the form that `listed` has."""
    for row in listed(connection):
        if row["id"] == webhook:
            return row
    raise UnknownWebhookError(f"no webhook has the id {webhook}")


def create(connection: sa.Connection, name: str, url: str, severity: str, by: str) -> str:
    """Store a webhook and return its public id."""
    webhook = secrets.token_hex(6)
    values: dict[str, Any] = {"id": webhook, "name": name, "url": url, "severity": severity}
    values |= {"created_at": now(connection), "created_by": by}
    connection.execute(sa.insert(webhooks).values(values))
    return webhook


def delete(connection: sa.Connection, webhook: str) -> None:
    """Delete a webhook, so that it gets no further notifications."""
    if not connection.execute(sa.delete(webhooks).where(webhooks.c.id == webhook)).rowcount:
        raise UnknownWebhookError(f"no webhook has the id {webhook}")


def of_severity(connection: sa.Connection, severity: str) -> list[int]:
    """Return the keys of the webhooks that receive alerts of a severity."""
    least = SEVERITIES[: SEVERITIES.index(severity) + 1]
    query = sa.select(webhooks.c.key).where(webhooks.c.severity.in_(least))
    return list(connection.execute(query.order_by(webhooks.c.key)).scalars())
