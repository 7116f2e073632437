"""Webhooks, the receivers of alerts, and the queue of notifications to them.

`get` and `delete` raise `UnknownWebhookError` if there is no webhook with this id.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.database import now
from paceline_backend.store.schema import alert_deliveries, webhooks

# Severities of alerts, in ascending order.
SEVERITIES = ("info", "warning", "critical")


class UnknownWebhookError(PacelineError):
    """No webhook has this id."""


def listed(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return all webhooks, oldest first, each with the result of its newest delivery."""
    d = alert_deliveries.c
    others = alert_deliveries.alias()
    newest = sa.select(sa.func.max(others.c.key)).where(others.c.webhook == webhooks.c.key)
    sent_at = sa.case((d.error.is_(None), d.tried_at)).label("sent_at")
    last = (d.tries, d.tried_at, sent_at, d.due_at, d.status, d.error)
    joined = webhooks.outerjoin(alert_deliveries, d.key == newest.scalar_subquery())
    query = sa.select(webhooks, *last).select_from(joined)
    rows = connection.execute(query.order_by(webhooks.c.key)).mappings()
    return [dict(row) for row in rows]


def get(connection: sa.Connection, webhook: str) -> dict[str, Any]:
    """Return a webhook in the form that `listed` returns."""
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
    """Delete a webhook."""
    if not connection.execute(sa.delete(webhooks).where(webhooks.c.id == webhook)).rowcount:
        raise UnknownWebhookError(f"no webhook has the id {webhook}")


@dataclass(frozen=True)
class DueDelivery:
    """A delivery that is due and that the caller has claimed.

    `webhook` is a public id, `body` the exact bytes to send, and `tries` the number of earlier
    attempts.
    """

    key: int
    webhook: str
    url: str
    body: bytes
    tries: int


def queue(
    connection: sa.Connection, alert: int, event: str, severity: str, body: bytes, at: float
) -> int:
    """Enqueue a ``raised`` or ``resolved`` event for all webhooks that receive its severity.

    Call it in the transaction that records the event. `at` is the Unix time of the event and of the
    first attempt. Return the number of webhooks that receive the event.
    """
    keys = _of_severity(connection, severity)
    values = {"alert": alert, "event": event, "body": body, "due_at": at, "tries": 0}
    rows = [{**values, "webhook": key} for key in keys]
    if rows:
        connection.execute(sa.insert(alert_deliveries), rows)
    return len(rows)


def claim(connection: sa.Connection, for_s: float, limit: int) -> list[DueDelivery]:
    """Claim due deliveries; no other worker gets them for `for_s` seconds."""
    d, w = alert_deliveries.c, webhooks.c
    at = now(connection)
    keys = sa.select(d.key).where(d.due_at <= at).order_by(d.due_at, d.key).limit(limit)
    due = list(connection.execute(keys.with_for_update(skip_locked=True)).scalars())
    if not due:
        return []
    mine = sa.update(alert_deliveries).where(d.key.in_(due), d.due_at <= at)
    connection.execute(mine.values(due_at=at + for_s))
    query = sa.select(d.key, w.id, w.url, d.body, d.tries)
    query = query.join(webhooks, w.key == d.webhook).where(d.key.in_(due))
    return [DueDelivery(*row) for row in connection.execute(query.order_by(d.key))]


def note(
    connection: sa.Connection,
    key: int,
    status: int | None,
    error: str | None,
    again_s: float | None,
) -> None:
    """Record the result of a delivery attempt.

    `status` is the HTTP status, or None if there was no response. `error` is the reason of a
    failure, or None after success. `again_s` is the number of seconds until the next attempt, or
    None if there will be no other attempt. If the webhook was deleted meanwhile, nothing is stored.
    """
    d = alert_deliveries.c
    at = now(connection)
    values = {
        "tries": d.tries + 1,
        "tried_at": at,
        "status": status,
        "error": error,
        "due_at": None if again_s is None else at + again_s,
    }
    connection.execute(sa.update(alert_deliveries).where(d.key == key).values(values))


def _of_severity(connection: sa.Connection, severity: str) -> list[int]:
    least = SEVERITIES[: SEVERITIES.index(severity) + 1]
    query = sa.select(webhooks.c.key).where(webhooks.c.severity.in_(least))
    return list(connection.execute(query.order_by(webhooks.c.key)).scalars())
