"""Read and request policy switches of a run: one row per policy version.

Functions that take a public id raise `UnknownRunError` if there is no such run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from paceline.wire.states import ACTIVE
from paceline_backend.store.database import Store
from paceline_backend.store.runs import RunEndedError, key_of
from paceline_backend.store.schema import runs, switches


@dataclass(frozen=True)
class Switch:
    """A requested policy; version 0 is the policy at the start.

    `effective_step` is the first step that the policy planned, None if it has planned none yet.
    """

    version: int
    policy: str
    by: str
    effective_step: int | None
    parameters: dict[str, Any] = field(default_factory=dict)


_COLUMNS = (
    switches.c.version,
    switches.c.policy,
    switches.c.requested_by,
    switches.c.effective_step,
    switches.c.parameters,
)


def add(
    connection: sa.Connection,
    run: str,
    policy: str,
    parameters: Mapping[str, Any],
    by: str,
    why: str = "",
) -> dict[str, Any]:
    """Request another policy on behalf of `by`; return the new row of `switches`.

    Raises:
        RunEndedError: the run has ended.
    """
    # The update locks the run's row first, so that two concurrent switches get two versions.
    row = connection.execute(
        sa.update(runs)
        .where(runs.c.id == run, runs.c.state.in_(ACTIVE))
        .values(policy=policy, version=runs.c.version + 1)
        .returning(runs.c.key, runs.c.version)
    ).one_or_none()
    if row is None:
        key_of(connection, run)
        raise RunEndedError(f"run {run} has ended: its policy can no longer be changed")
    values = {
        "version": row.version,
        "policy": policy,
        "parameters": dict(parameters),
        "requested_at": time.time(),
        "requested_by": by,
        "why": why,
    }
    connection.execute(sa.insert(switches).values(run=row.key, **values))
    return {**values, "effective_step": None, "effective_at": None}


def rows(store: Store, run: str) -> list[dict[str, Any]]:
    """Return all switches of a run in the form that the API shows, oldest first."""
    with store.read() as connection:
        return rows_of(connection, run)


def rows_of(connection: sa.Connection, run: str) -> list[dict[str, Any]]:
    """Return all switches of a run, like `rows`, but in the caller's transaction."""
    columns = [column for column in switches.c if column.name != "run"]
    query = sa.select(*columns).where(switches.c.run == key_of(connection, run))
    in_order = connection.execute(query.order_by(switches.c.version))
    return [{str(name): value for name, value in row._mapping.items()} for row in in_order]


def latest(connection: sa.Connection, run: int) -> Switch:
    """Return the policy that was requested last."""
    query = sa.select(*_COLUMNS).where(switches.c.run == run)
    return Switch(*connection.execute(query.order_by(switches.c.version.desc()).limit(1)).one())


def of_version(connection: sa.Connection, run: int, version: int) -> Switch | None:
    """Return the policy of a version; None if there is no such version."""
    query = sa.select(*_COLUMNS).where(switches.c.run == run, switches.c.version == version)
    row = connection.execute(query).one_or_none()
    return None if row is None else Switch(*row)


def history(connection: sa.Connection, run: int) -> list[Switch]:
    """Return all switches of a run, oldest first."""
    query = sa.select(*_COLUMNS).where(switches.c.run == run).order_by(switches.c.version)
    return [Switch(*row) for row in connection.execute(query)]
