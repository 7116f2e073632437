"""Cordons that a worker process must forward to an engine, and the engine's replies."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import sqlalchemy as sa

from paceline_backend.store.database import Connection
from paceline_backend.store.schema import cordons


@dataclass(frozen=True)
class Word:
    """A change of a machine's cordon that must be sent to its engine.

    `reason` has author and reason of the cordon, or is None if the machine is no longer cordoned.
    `rows` has `key` and `lifted_at` of the rows of `cordons` behind the change.
    """

    backend: str
    host: str
    reason: str | None
    rows: tuple[tuple[int, float | None], ...]


def waiting(connection: Connection, backends: Collection[str]) -> list[Word]:
    """Return the changes that some engines have not received yet, oldest first.

    A machine with several rows is cordoned while one of them is not lifted.
    """
    c = cordons.c
    untold = (c.host.is_not(None), c.told_at.is_(None), c.refusal.is_(None))
    hosts = sa.select(c.backend, c.host).where(c.backend.in_(backends), *untold).distinct()
    due = {(row.backend, row.host) for row in connection.execute(hosts)}
    if not due:
        return []
    counts = c.lifted_at.is_(None) | c.told_at.is_(None)
    query = sa.select(cordons).where(sa.tuple_(c.backend, c.host).in_(due), counts)
    of_host: dict[tuple[str, str], list[sa.Row[tuple[object, ...]]]] = defaultdict(list)
    for row in connection.execute(query.order_by(c.key)):
        of_host[row.backend, row.host].append(row)
    words = []
    for (backend, host), rows in of_host.items():
        present = [row for row in rows if row.lifted_at is None]
        reason = _reason(present[-1].by, present[-1].reason) if present else None
        behind = tuple((row.key, row.lifted_at) for row in rows)
        words.append(Word(backend, host, reason, behind))
    return words


def _reason(by: str, why: str) -> str:
    return f"{by}: {why}" if why else by


def note(connection: Connection, word: Word, refusal: str | None) -> None:
    """Record that an engine accepted a change, or why it refused.

    Rows that changed since `word` was sent are sent again, even if another worker has sent them,
    because it is unknown which of the two messages arrived last. `refusal` is the engine's error
    message, None if it accepted.
    """
    c = cordons.c
    said = {"told_at": None if refusal else time.time(), "refusal": refusal}
    for key, lifted_at in word.rows:
        mine = sa.update(cordons).where(c.key == key)
        same = mine.where(c.lifted_at.is_not_distinct_from(lifted_at))
        if not connection.execute(same.values(said)).rowcount:
            connection.execute(mine.values(told_at=None, refusal=None))
    newer = (c.backend == word.backend, c.host == word.host, c.key > word.rows[-1][0])
    connection.execute(sa.update(cordons).where(*newer).values(told_at=None, refusal=None))


def untaken(connection: Connection, backend: str) -> list[str]:
    """Return an engine's machines that are cordoned here, but not (yet) by the engine."""
    c = cordons.c
    query = sa.select(c.host).where(c.backend == backend, c.host.is_not(None), c.told_at.is_(None))
    return sorted(set(connection.execute(query.where(c.lifted_at.is_(None))).scalars()))
