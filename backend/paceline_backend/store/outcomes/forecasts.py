"""Forecasts of runs, and the settings of `auto`, which may act on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import ENDED
from paceline_backend.store import attempts, leases, runs
from paceline_backend.store.database import now
from paceline_backend.store.schema import forecasts
from paceline_backend.store.schema import runs as runs_table

# Number of forecasts that are kept per run, besides those that led to a switch.
KEPT_FORECASTS = 50


@dataclass(frozen=True)
class AdvisedRun:
    """A run that `auto` evaluates.

    `mode` is ``recommend`` or ``switch``, and `relaxed` whether `auto` may choose a relaxed
    synchronisation.
    """

    key: int
    id: str
    mode: str
    relaxed: bool
    attempt: int | None


def add(connection: sa.Connection, run: int, body: Mapping[str, Any]) -> None:
    """Store a forecast and delete old ones, except those whose decision changed the policy.

    `body` has the fields of a `whatif.answer.Forecast` whose `steps` is above 0.
    """
    c = forecasts.c
    row = {"run": run, "made_at": body["made_at"], "body": body}
    connection.execute(sa.insert(forecasts).values(row))
    old = (
        sa.select(c.made_at, c.body)
        .where(c.run == run)
        .order_by(c.made_at.desc())
        .offset(KEPT_FORECASTS)
    )
    gone = [made_at for made_at, kept in connection.execute(old) if not _acted(kept)]
    if gone:
        connection.execute(sa.delete(forecasts).where(c.run == run, c.made_at.in_(gone)))


def _acted(body: Mapping[str, Any]) -> bool:
    return (body.get("decision") or {}).get("decided") in ("switch", "back")


def bodies(connection: sa.Connection, run: int, limit: int = -1) -> list[dict[str, Any]]:
    """Return the newest `limit` forecasts of a run (-1: all), oldest first."""
    query = sa.select(forecasts.c.body).where(forecasts.c.run == run)
    query = query.order_by(forecasts.c.made_at.desc())
    if limit >= 0:
        query = query.limit(limit)
    return list(connection.scalars(query))[::-1]


def decided(connection: sa.Connection, run: int) -> dict[str, Any] | None:
    """Return the newest forecast with a decision of `auto`."""
    decisions = [body for body in bodies(connection, run) if body.get("decision")]
    return decisions[-1] if decisions else None


def version(connection: sa.Connection, run: int) -> int:
    """Return the version of the policy that was requested last."""
    query = sa.select(runs_table.c.version).where(runs_table.c.key == run)
    return int(connection.execute(query).scalar_one())


def state(connection: sa.Connection, run: int) -> str:
    """Return the state of the run."""
    query = sa.select(runs_table.c.state).where(runs_table.c.key == run)
    return str(connection.execute(query).scalar_one())


def auto(connection: sa.Connection, run: int) -> dict[str, Any]:
    """Return `mode`, `relaxed`, `requested_at` and `requested_by` of a run; default mode: off."""
    query = sa.select(runs_table.c.auto).where(runs_table.c.key == run)
    kept: dict[str, Any] | None = connection.execute(query).scalar()
    off = {"mode": "off", "relaxed": False, "requested_at": None, "requested_by": None}
    return off if kept is None else kept


def set_auto(
    connection: sa.Connection,
    run: str,
    mode: str,
    by: str,
    at: float,
    relaxed: bool | None = None,
) -> None:
    """Set the `mode` of `auto` for a run at the Unix time `at`, on behalf of `by`.

    `relaxed` is whether `auto` may choose relaxed synchronisation; None leaves it unchanged.

    Raises:
        UnknownRunError: no such run.
        RunEndedError: the run has ended.
    """
    key = runs.key_of(connection, run)
    if state(connection, key) in ENDED:
        raise runs.RunEndedError(f"run {run} has ended: it can no longer be changed")
    if relaxed is None:
        relaxed = auto(connection, key)["relaxed"]
    kept = {"mode": mode, "relaxed": relaxed, "requested_at": at, "requested_by": by}
    connection.execute(sa.update(runs_table).where(runs_table.c.key == key).values(auto=kept))


def watched(connection: sa.Connection, owner: str) -> list[AdvisedRun]:
    """Return the active runs that `auto` evaluates, except those that another worker plans."""
    c = runs_table.c
    query = (
        sa.select(c.key, c.id, c.attempt, c.auto)
        .where(c.state == "running", c.auto.is_not(sa.null()))
        .order_by(c.key)
    )
    own = leases.unless_planned(query, owner, now(connection))
    return [
        AdvisedRun(row.key, row.id, row.auto["mode"], row.auto["relaxed"], row.attempt)
        for row in connection.execute(own)
        if row.auto["mode"] != "off"
    ]


def newest_step(connection: sa.Connection, run: int) -> int:
    """Return the newest complete step that no restart discarded; -1 if there is none."""
    attempt = connection.scalar(sa.select(runs_table.c.attempt).where(runs_table.c.key == run))
    spans = attempts.spans(connection, run, attempt)
    last = attempts.newest_complete(connection, run, spans)
    return -1 if last is None else int(last.step)
