"""Queue of notifications to webhooks: enqueue, claim, and record the result of each attempt."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from paceline_backend.store.alerts import webhooks
from paceline_backend.store.alerts.tables import alert_deliveries
from paceline_backend.store.alerts.tables import webhooks as webhooks_table
from paceline_backend.store.database import now


@dataclass(frozen=True)
class DueDelivery:
    """A delivery that is due and that the caller has claimed.

    `webhook` is a public id, `body` exactly what is sent, and `tries` the number of earlier
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
    """Enqueue a ``raised`` or ``resolved`` event for the webhooks of its severity; count them.

    Call it in the transaction that records the event. Webhooks with a higher minimum severity are
    skipped. `at` is the Unix time of the event and of the first attempt. Return the number of
    webhooks.
    """
    keys = webhooks.of_severity(connection, severity)
    values = {"alert": alert, "event": event, "body": body, "created_at": at, "due_at": at}
    rows = [{**values, "webhook": key, "claimed_until": 0.0, "tries": 0} for key in keys]
    if rows:
        connection.execute(sa.insert(alert_deliveries), rows)
    return len(rows)


def claim(connection: sa.Connection, for_s: float, limit: int) -> list[DueDelivery]:
    """Claim due deliveries; no other worker gets them for `for_s` seconds."""
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
    """Record the result of a delivery attempt.

    `status` is the HTTP status (None: no response), `error` the reason of a failure (None:
    success), and `again_s` the seconds until the next attempt (None: give up). The webhook may be
    deleted by now.
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
