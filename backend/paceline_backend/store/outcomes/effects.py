"""Measured effects of policy switches, in rows that outlive the runs and their steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline.wire import ENDED, State
from paceline_backend.store import leases
from paceline_backend.store.database import now
from paceline_backend.store.runs import cursor_at, key_at
from paceline_backend.store.schema import effects, runs, switches

# This many seconds after a run's end, its last telemetry is assumed to have arrived.
RUN_SETTLE_S = 60.0


@dataclass(frozen=True)
class Due:
    """A run with a switch whose effect is not final yet."""

    key: int
    id: str
    ended: bool


@dataclass(frozen=True)
class OutcomeFilter:
    """Filter for outcomes of forecasts; None accepts all.

    `since` (inclusive) and `until` (exclusive) are Unix times of the switch, `policy` is the preset
    that was switched to, and `nodes` the number of nodes of the run. `simulated` includes simulated
    runs, whose steps come from the same simulator as the forecasts.
    """

    since: float | None = None
    until: float | None = None
    policy: str | None = None
    nodes: int | None = None
    simulated: bool = False


def due(connection: sa.Connection, owner: str, limit: int) -> list[Due]:
    """Return the runs with switches to measure, except runs that another worker plans.

    `limit` applies only to ended runs.
    """
    c = runs.c
    kept = sa.and_(effects.c.run == c.id, effects.c.version == switches.c.version)
    settled = c.ended_at + RUN_SETTLE_S
    again = sa.and_(effects.c.noted_at < settled, settled <= time.time())
    ended = sa.or_(effects.c.key.is_(None), sa.and_(~effects.c.complete, again))
    active = sa.or_(effects.c.key.is_(None), ~effects.c.complete)
    joined = (
        sa.select(c.key, c.id, c.state)
        .join(switches, switches.c.run == c.key)
        .outerjoin(effects, kept)
        .where(switches.c.version > 0, switches.c.effective_step.is_not(None))
        .where(c.pruned_at.is_(None))
        .distinct()
        .order_by(c.key)
    )
    own = leases.unless_planned(joined, owner, now(connection))
    rows = [
        *connection.execute(own.where(c.state == State.RUNNING, active)),
        *connection.execute(own.where(c.state.in_(ENDED), ended).limit(limit)),
    ]
    return [Due(row.key, row.id, row.state in ENDED) for row in rows]


def keep(
    connection: sa.Connection,
    run: int,
    effect: Mapping[str, Any],
    nodes: int | None,
    ranks: int | None,
) -> None:
    """Store the effect of a switch; a later measurement replaces an earlier one.

    `effect` has the fields of `insight.effects.SwitchEffect`. `nodes` and `ranks` are the
    numbers of nodes and ranks that the run had, None if unknown.
    """
    c, version = effects.c, effect["version"]
    query = sa.select(runs.c.id, runs.c.backend, switches.c.effective_at, switches.c.requested_at)
    query = query.join(switches, switches.c.run == runs.c.key)
    query = query.where(runs.c.key == run, switches.c.version == version)
    about = connection.execute(query).one_or_none()
    if about is None:
        # The run was deleted meanwhile.
        return
    row = {
        "run": about.id,
        "version": version,
        "policy": effect["policy"],
        "backend": about.backend,
        "nodes": nodes,
        "ranks": ranks,
        "at": about.requested_at if about.effective_at is None else about.effective_at,
        "noted_at": time.time(),
        "complete": effect["complete"],
        "scored": effect["saving"] is not None and effect["forecast"] is not None,
        "body": effect,
    }
    mine = (c.run == about.id, c.version == version)
    if not connection.execute(sa.update(effects).where(*mine).values(row)).rowcount:
        connection.execute(sa.insert(effects).values(row))


def of_run(connection: sa.Connection, run: int) -> dict[int, dict[str, Any]]:
    """Return the effects of a run's switches, as `keep` stored them, by policy version."""
    public = sa.select(runs.c.id).where(runs.c.key == run).scalar_subquery()
    query = sa.select(effects.c.version, effects.c.body).where(effects.c.run == public)
    return {row.version: row.body for row in connection.execute(query)}


def outcomes(
    connection: sa.Connection, which: OutcomeFilter, limit: int, cursor: str | None = None
) -> tuple[list[dict[str, Any]], str | None]:
    """Return switches with a forecast and a final effect, newest first, and the cursor to continue.

    Effects that are not final are left out. If effects were included as soon as they are
    significant, the result would have too many that are large only by chance.

    Raises:
        CursorError: `cursor` does not come from an earlier page.
    """
    c = effects.c
    over = sa.or_(
        c.complete,
        sa.exists().where(
            runs.c.id == c.run,
            runs.c.state.in_(ENDED),
            c.noted_at >= runs.c.ended_at + RUN_SETTLE_S,
        ),
        # Include deleted runs, because they have ended.
        ~sa.exists().where(runs.c.id == c.run),
    )
    query = sa.select(effects).where(over, c.scored)
    if which.since is not None:
        query = query.where(c.at >= which.since)
    if which.until is not None:
        query = query.where(c.at < which.until)
    for column, value in ((c.policy, which.policy), (c.nodes, which.nodes)):
        if value is not None:
            query = query.where(column == value)
    if not which.simulated:
        query = query.where(c.backend != "simulated")
    if cursor is not None:
        query = query.where(c.key < key_at(cursor, "an earlier page"))
    rows = connection.execute(query.order_by(c.key.desc()).limit(limit + 1)).mappings().all()
    following = cursor_at(rows[limit - 1]["key"]) if len(rows) > limit else None
    return [dict(row) for row in rows[:limit]], following
