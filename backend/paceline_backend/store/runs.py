"""Runs: what REST changes and lists, and what the worker looks for."""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import sqlalchemy as sa

from paceline.core import runid
from paceline.core.errors import PacelineError
from paceline.wire import ENDED, Hello, State
from paceline_backend.store import attempts, blobs
from paceline_backend.store.database import Store
from paceline_backend.store.schema import leases, runs, scenarios

_PUBLIC = [column for column in runs.c if column.name not in ("hello", "env", "seen_at", "lost")]


class UnknownRunError(PacelineError):
    """No run has this id."""


class RunEndedError(PacelineError):
    """The run has ended: nothing about it can be changed."""


class CursorError(PacelineError):
    """Not a cursor of ours."""


@dataclass(frozen=True)
class HelloFacts:
    """What the API tells of a Hello."""

    epochs: int | None
    device: str
    emulated: dict[str, Any] | None
    dif: float  # of the data set: sample standard deviation of the sizes


def key_of(connection: sa.Connection, run: str) -> int:
    """The key of a run's rows in the other tables.

    Raises:
        UnknownRunError: no such run.
    """
    key = connection.execute(sa.select(runs.c.key).where(runs.c.id == run)).scalar()
    if key is None:
        raise UnknownRunError(f"no run {run}")
    return int(key)


def whole_id(connection: sa.Connection, given: str) -> str:
    """A run's public id, of itself or of a beginning that no other run's id has.

    Raises:
        InputError: no run's id begins with it, or several do.
    """
    ids = sa.select(runs.c.id).where(runs.c.id.startswith(runid.checked(given), autoescape=True))
    return runid.chosen(given, connection.execute(ids).scalars())


def end(
    connection: sa.Connection, run: str, state: str, message: str, *, lost: bool = False
) -> bool:
    """Ends a run that no process will end any more; False if it had ended before.

    Args:
        connection: to write with.
        run: public id.
        state: how it ends.
        message: why.
        lost: it is only assumed: who supervised the run may still tell another end.
    """
    changed = connection.execute(
        sa.update(runs)
        .where(runs.c.id == run, runs.c.state.in_(State(state).predecessors))
        .values(state=state, ended_at=time.time(), message=message, lost=lost)
    )
    return changed.rowcount > 0


def get(store: Store, run: str) -> dict[str, Any]:
    """One run as the API shows it.

    Raises:
        UnknownRunError: no such run.
    """
    with store.read() as connection:
        rows = _select(store, connection, sa.select(*_PUBLIC).where(runs.c.id == run))
    if not rows:
        raise UnknownRunError(f"no run {run}")
    return rows[0]


def page(
    store: Store,
    *,
    states: Sequence[str] = (),
    policy: str | None = None,
    name: str | None = None,
    since: float | None = None,
    limit: int = 50,
    cursor: str | None = None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Runs, newest first, and the cursor of the next page (None: this was the last).

    A page goes on below the last run of the one before: runs created meanwhile shift nothing.

    Raises:
        CursorError: `cursor` is not one that an earlier page gave.
    """
    query = sa.select(*_PUBLIC).order_by(runs.c.key.desc()).limit(limit + 1)
    if states:
        query = query.where(runs.c.state.in_(states))
    if policy is not None:
        query = query.where(runs.c.policy == policy)
    if name is not None:
        query = query.where(runs.c.name.icontains(name, autoescape=True))
    if since is not None:
        query = query.where(runs.c.created_at >= since)
    if cursor is not None:
        query = query.where(runs.c.key < _uncursor(cursor))
    with store.read() as connection:
        rows = _select(store, connection, query, keep_key=True)
    keys = [row.pop("key") for row in rows]
    more = len(rows) > limit
    return rows[:limit], _cursor(keys[limit - 1]) if more else None


def active(connection: sa.Connection, backends: Collection[str]) -> dict[int, str]:
    """Runs that start or train, and whose leader said hello: key → public id.

    Args:
        connection: to read from.
        backends: only runs of these.
    """
    query = sa.select(runs.c.key, runs.c.id).where(
        runs.c.state.in_((State.STARTING, State.RUNNING)),
        runs.c.hello.is_not(None),
        runs.c.backend.in_(backends),
    )
    return {int(row.key): str(row.id) for row in connection.execute(query)}


def counts(connection: sa.Connection) -> dict[str, int]:
    """How many runs are in each state."""
    query = sa.select(runs.c.state, sa.func.count()).group_by(runs.c.state)
    return {str(state): int(count) for state, count in connection.execute(query)}


def hello(connection: sa.Connection, key: int) -> Hello | None:
    """The latest Hello of a run's leader; None if it cannot be used."""
    data = connection.execute(sa.select(runs.c.hello).where(runs.c.key == key)).scalar()
    return None if data is None else blobs.hello(data)


def scenario(connection: sa.Connection, run: str) -> dict[str, Any] | None:
    """What a simulated run simulates; None of another.

    Raises:
        UnknownRunError: no such run.
    """
    query = sa.select(scenarios.c.body).where(scenarios.c.run == key_of(connection, run))
    body = connection.execute(query).scalar()
    return None if body is None else blobs.unpack_json(body, "scenario")


def lost(store: Store, silent_s: float) -> list[tuple[str, str]]:
    """Runs of which nothing has come for so long, and what to say about them: (run, message).

    Who supervises a run repeats its state: neither its node's agent nor its ranks need speak.
    """
    query = (
        sa.select(runs.c.id, runs.c.state, runs.c.node)
        .where(
            runs.c.state.not_in(ENDED),
            sa.func.coalesce(runs.c.seen_at, runs.c.created_at) < time.time() - silent_s,
        )
        .order_by(runs.c.key)
    )
    with store.read() as connection:
        rows = connection.execute(query).all()
    return [
        (
            str(row.id),
            f"nobody started it within {silent_s:g} s"
            if row.state == "pending"
            else f"nothing was heard of it for {silent_s:g} s: {row.node or 'its node'} went away",
        )
        for row in rows
    ]


def _select(
    store: Store, connection: sa.Connection, query: sa.Select[Any], *, keep_key: bool = False
) -> list[dict[str, Any]]:
    """Runs with what other tables say about them."""
    rows = [_plain(row) for row in connection.execute(query)]
    owners = {
        row.run: {"owner": row.owner, "alive": row.expires_at > time.time()}
        for row in connection.execute(
            sa.select(leases).where(leases.c.run.in_([run["key"] for run in rows]))
        )
    }
    for run in rows:
        key, attempt = run["key"], run["attempt"]
        facts = None if attempt is None else _facts(store, key, attempt)
        for name in HelloFacts.__dataclass_fields__:
            run[name] = getattr(facts, name, None)
        spans = attempts.spans(connection, key, attempt)
        last = attempts.newest_complete(connection, key, spans)
        run["epoch"], run["step"] = (None, None) if last is None else (last.epoch, last.step)
        run["controller"] = owners.get(key)
        if not keep_key:
            del run["key"]
    return rows


@lru_cache(maxsize=1024)
def _facts(store: Store, key: int, attempt: int) -> HelloFacts | None:
    """Of a Hello, which holds a number per sample: too long to read again for every list."""
    with store.read() as connection:
        message = hello(connection, key)
    if message is None:
        return None
    sizes = message.sizes_array()
    dif = float(sizes.std(ddof=1)) if len(sizes) > 1 else 0.0
    return HelloFacts(message.epochs, message.device, message.emulated, dif)


def _plain(row: sa.Row[Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row._mapping.items()}


def _cursor(key: int) -> str:
    return base64.urlsafe_b64encode(b"%d" % key).decode().rstrip("=")


def _uncursor(cursor: str) -> int:
    try:
        key = int(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
    except ValueError:  # not ASCII, not Base64, no number, or one of thousands of digits
        key = -1
    if not 0 <= key < 2**63:
        raise CursorError("cursor: not one that GET /runs gave; leave it out to start anew")
    return key
