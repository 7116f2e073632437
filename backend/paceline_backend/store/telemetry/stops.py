"""Mark runs as stopped whose script exited successfully only because of a requested stop."""

from __future__ import annotations

from collections.abc import Iterable

import sqlalchemy as sa

from paceline.wire import State
from paceline.wire.states import Cause
from paceline_backend.store import runs, schema, segments
from paceline_backend.store.audit import stop_of
from paceline_backend.store.telemetry.locked import LockedRun


def settle(connection: sa.Connection, of: Iterable[LockedRun]) -> None:
    """Change runs that have just finished to `stopped` if a stop was requested.

    A run that had completed its last epoch nevertheless stays finished. If the number of its epochs
    is unknown, it becomes stopped. Call this in the transaction that wrote the runs' newest
    segments, after the runs' changes were saved.
    """
    for run in of:
        if run.changes.get("state") is not State.FINISHED:
            continue
        stop = stop_of(connection, run.id)
        if stop is None or _is_through(connection, run.key):
            continue
        message = f"stopped by {stop['who']}"
        if stop["why"]:
            message += f": {stop['why']}"
        finished = schema.runs.c.state.in_(Cause.STOP_REQUESTED.sources(State.STOPPED))
        query = sa.update(schema.runs).where(schema.runs.c.key == run.key, finished)
        connection.execute(query.values(state=State.STOPPED, message=message))


def _is_through(connection: sa.Connection, run: int) -> bool:
    hello = runs.hello(connection, run)
    return (
        hello is not None and hello.epochs is not None and segments.through(connection, run, hello)
    )
