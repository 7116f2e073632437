"""Deliveries: what webhooks are still to be told, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from paceline_backend.store.alerts import webhooks
from paceline_backend.store.alerts.tables import alert_deliveries
from paceline_backend.store.alerts.tables import webhooks as webhooks_table
from paceline_backend.store.database import now


@dataclass(frozen=True)
class DueDelivery:
    """A try that is due, and that nobody else makes meanwhile."""

    key: int
    webhook: str  # public id
    url: str
    body: bytes
    tries: int  # that were made before


def queue(
    connection: sa.Connection, alert: int, event: str, severity: str, body: bytes, at: float
) -> int:
    """Lets all webhooks be told of an event, in the transaction of the event; how many.

    Args:
        connection: to write with.
        alert: its key.
        event: ``raised`` or ``resolved``.
        severity: of the alert: other webhooks are not told.
        body: what is sent.
        at: Unix time of the event, and of the first try.
    """
    keys = webhooks.of_severity(connection, severity)
    values = {"alert": alert, "event": event, "body": body, "created_at": at, "due_at": at}
    rows = [{**values, "webhook": key, "claimed_until": 0.0, "tries": 0} for key in keys]
    if rows:
        connection.execute(sa.insert(alert_deliveries), rows)
    return len(rows)


def claim(connection: sa.Connection, for_s: float, limit: int) -> list[DueDelivery]:
    """Takes the deliveries that are due; for `for_s` seconds no other worker gets them."""
    d, w = alert_deliveries.c, webhooks_table.c
    at = now(connection)
    free = (d.due_at <= at, d.claimed_until <= at)
    keys = sa.select(d.key).where(*free).order_by(d.due_at, d.key).limit(limit)
    due = list(connection.execute(keys.with_for_update(skip_locked=True)).scalars())
    if not due:
        return []
    mine = sa.update(alert_deliveries).where(d.key.in_(due), *free)
    connection.execute(mine.values(claimed_until=at + for_s))
    query = sa.select(d.key, w.id, w.url, d.body, d.tries)
    query = query.join(webhooks_table, w.key == d.webhook).where(d.key.in_(due))
    return [DueDelivery(*row) for row in connection.execute(query.order_by(d.key))]


def note(
    connection: sa.Connection,
    key: int,
    status: int | None,
    error: str | None,
    again_s: float | None,
) -> None:
    """Notes what became of a try.

    Args:
        connection: to write with.
        key: of the delivery; its webhook may be gone.
        status: HTTP status; None: there was no answer.
        error: why it was not taken; None: it was.
        again_s: seconds until the next try; None: there is none.
    """
    d = alert_deliveries.c
    at = now(connection)
    values = {
        "tries": d.tries + 1,
        "tried_at": at,
        "status": status,
        "error": error,
        "sent_at": at if error is None else None,
        "due_at": None if again_s is None else at + again_s,
        "claimed_until": 0.0,
    }
    connection.execute(sa.update(alert_deliveries).where(d.key == key).values(values))
