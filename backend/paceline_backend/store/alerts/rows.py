"""Read, write and acknowledge alerts.

`get` and `acknowledge` raise `UnknownAlertError` if there is no alert with this key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.store.database import now
from paceline_backend.store.runs import cursor_at, key_at
from paceline_backend.store.schema import alerts

AlertState = Literal["raised", "resolved"]


class UnknownAlertError(PacelineError):
    """No alert has this id."""


class AcknowledgedError(PacelineError):
    """The alert is already acknowledged or resolved."""


@dataclass(frozen=True)
class AlertFilter:
    """Filter for a list of alerts; None accepts all.

    `state` is ``raised`` for active alerts, and ``resolved`` for those that have ended. `run` is a
    public id. `since` selects alerts that were raised at this Unix time or later.
    """

    state: AlertState | None = None
    rule: str | None = None
    run: str | None = None
    severity: str | None = None
    acknowledged: bool | None = None
    since: float | None = None


def unresolved(connection: sa.Connection) -> list[dict[str, Any]]:
    """Return the rows of alerts that are not resolved, even if not yet raised, and lock them."""
    query = sa.select(alerts).where(alerts.c.resolved_at.is_(None)).order_by(alerts.c.key)
    rows = connection.execute(query.with_for_update()).mappings()
    return [dict(row) for row in rows]


def add(connection: sa.Connection, values: Mapping[str, Any]) -> int:
    """Insert a row and return its key."""
    made = connection.execute(sa.insert(alerts).values(**values)).inserted_primary_key
    assert made is not None
    return int(made[0])


def update(connection: sa.Connection, key: int, values: Mapping[str, Any]) -> None:
    """Update columns of a row."""
    connection.execute(sa.update(alerts).where(alerts.c.key == key).values(**values))


def remove(connection: sa.Connection, key: int) -> None:
    """Delete a row whose condition ended before the alert was raised."""
    connection.execute(sa.delete(alerts).where(alerts.c.key == key))


def forget(connection: sa.Connection, before: float) -> None:
    """Delete alerts that were resolved before a Unix time, and their deliveries."""
    connection.execute(sa.delete(alerts).where(alerts.c.resolved_at < before))


def page(
    connection: sa.Connection, which: AlertFilter, limit: int, cursor: str | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return one page of alerts, newest first, and the cursor of the next page, or None at the end.

    Raises:
        CursorError: `cursor` does not come from an earlier page.
    """
    c = alerts.c
    query = sa.select(alerts).where(c.raised_at.is_not(None))
    if which.state is not None:
        resolved = c.resolved_at.is_not(None)
        query = query.where(resolved if which.state == "resolved" else ~resolved)
    for column, value in ((c.rule, which.rule), (c.run, which.run), (c.severity, which.severity)):
        if value is not None:
            query = query.where(column == value)
    if which.acknowledged is not None:
        acknowledged = c.acknowledged_at.is_not(None)
        query = query.where(acknowledged if which.acknowledged else ~acknowledged)
    if which.since is not None:
        query = query.where(c.raised_at >= which.since)
    if cursor is not None:
        query = query.where(c.key < key_at(cursor, "an earlier page"))
    rows = connection.execute(query.order_by(c.key.desc()).limit(limit + 1)).mappings().all()
    following = cursor_at(rows[limit - 1]["key"]) if len(rows) > limit else None
    return [shown(row) for row in rows[:limit]], following


def get(connection: sa.Connection, key: int) -> dict[str, Any]:
    """Return an alert in the form that `page` returns."""
    query = sa.select(alerts).where(alerts.c.key == key, alerts.c.raised_at.is_not(None))
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        raise UnknownAlertError(f"no alert has the id {key}")
    return shown(row)


def counts(connection: sa.Connection) -> dict[str, int]:
    """Return the numbers of active, of unacknowledged, and of critical unacknowledged alerts."""
    c = alerts.c
    query = sa.select(
        sa.func.count(),
        sa.func.count().filter(c.acknowledged_at.is_(None)),
        sa.func.count().filter(c.acknowledged_at.is_(None), c.severity == "critical"),
    ).where(c.raised_at.is_not(None), c.resolved_at.is_(None))
    raised, unacknowledged, critical = connection.execute(query).one()
    return {"raised": raised, "unacknowledged": unacknowledged, "critical": critical}


def acknowledge(connection: sa.Connection, key: int, by: str, why: str) -> dict[str, Any]:
    """Record that an operator takes care of an alert; return the updated alert.

    Raises:
        AcknowledgedError: the alert is already acknowledged or resolved.
    """
    c = alerts.c
    free = (c.key == key, c.acknowledged_at.is_(None), c.resolved_at.is_(None))
    values = {"acknowledged_at": now(connection), "acknowledged_by": by, "acknowledged_why": why}
    raised = c.raised_at.is_not(None)
    done = connection.execute(sa.update(alerts).where(*free, raised).values(values)).rowcount
    alert = get(connection, key)
    if not done:
        who = alert["acknowledged_by"]
        what = "is resolved" if who is None else f"was acknowledged by {who}"
        raise AcknowledgedError(f"alert {key} {what}: it needs no acknowledgement")
    return alert


def shown(row: Mapping[Any, Any]) -> dict[str, Any]:
    """Convert a row to the form that REST and webhooks show."""
    alert = {str(name): value for name, value in row.items() if name not in ("key", "run")}
    state = "raised" if row["resolved_at"] is None else "resolved"
    return {"id": row["key"], "run": row["run"] or None, "state": state, **alert}
