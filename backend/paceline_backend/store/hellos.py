"""Store the latest Hello of each run, and incomplete Hellos whose parts are still arriving.

A Hello is stored in parts (`wire.parts`) and not in the run's row: SQLite rewrites a whole row with
each change, and a Hello can have hundreds of megabytes.

A Hello that arrived in one message is encoded without the keys that this version does not know, cut
into parts (`pack`) and stored with `write`. Parts that arrive one by one are stored as they arrive,
with `add`, which returns the Hellos that became complete. Ingest then reads the complete Hello
(`read`), validates it (`wire.parts.joined` limits the size of its fields that are not arrays), and
calls `write`, which does not write its parts again. `of_run` reads the Hello that the run's row
names, and ignores it if its parts are not those that were validated.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from typing import NamedTuple

import sqlalchemy as sa

from paceline.wire import Hello, HelloPart
from paceline.wire.parts import PART_BYTES, digest
from paceline_backend.store import blobs
from paceline_backend.store.database import StoreRefusedError, insert
from paceline_backend.store.schema import hello_parts, runs

# Maximum number of incomplete Hellos of a run. Hellos of earlier attempts are deleted first.
_MOST_INCOMPLETE = 2
# Number of parts that `read` fetches from the database at a time.
_PARTS_PER_QUERY = 16

logger = logging.getLogger(__name__)


class HelloKey(NamedTuple):
    """Identity of a stored Hello; `run` is the run's key."""

    run: int
    attempt: int
    digest: bytes


class PackedHello(NamedTuple):
    """A validated Hello as it is stored: the digest of the message, and its parts.

    If the parts are already stored, `parts` is only their number.
    """

    digest: bytes
    parts: list[bytes] | int


def pack(hello: Hello) -> PackedHello:
    """Encode a validated Hello for `write`. Call this outside a transaction: it can be slow."""
    data = blobs.pack(hello)
    cuts = range(0, len(data), PART_BYTES)
    return PackedHello(digest(data), [data[at : at + PART_BYTES] for at in cuts])


def write(connection: sa.Connection, run: int, attempt: int, packed: PackedHello) -> None:
    """Store a run's latest Hello and delete earlier ones; the caller writes its digest to the run.

    Raises:
        StoreRefusedError: parts that were stored have been deleted.
    """
    named = HelloKey(run, attempt, packed.digest)
    if isinstance(packed.parts, int):
        if _count(connection, named) != packed.parts:
            raise StoreRefusedError("parts of a Hello were deleted before it could be used")
    else:
        # Parts that are already stored under this key were not validated.
        connection.execute(sa.delete(hello_parts).where(*_is(named)))
        _add(connection, [(named, number, data) for number, data in enumerate(packed.parts)])
    c = hello_parts.c
    older = sa.or_(c.attempt < attempt, sa.and_(c.attempt == attempt, c.hello != packed.digest))
    connection.execute(sa.delete(hello_parts).where(c.run == run, older))


def add(
    connection: sa.Connection,
    parts: Iterable[tuple[int, HelloPart]],
    assembling: Collection[HelloKey] = (),
) -> list[HelloKey]:
    """Store parts, each given with its run's key; return the Hellos that are complete now.

    The Hellos in `assembling` were complete before and stay, because the caller still reads them.
    """
    named_parts = [(HelloKey(run, part.attempt, part.hello), part) for run, part in parts]
    _add(connection, [(named, part.number, part.data) for named, part in named_parts])
    sizes = {named: part.of for named, part in named_parts}
    complete = [named for named, of in sizes.items() if _count(connection, named) == of]
    for run in {named.run for named in sizes}:
        bound(connection, run, [*complete, *assembling])
    return complete


def bound(
    connection: sa.Connection,
    run: int,
    complete: Collection[HelloKey],
    most: int = _MOST_INCOMPLETE,
) -> None:
    """Delete incomplete Hellos of a run, so that they cannot fill the database.

    Keep the Hellos in `complete`, because the caller validates them next, and up to `most` others
    of the latest attempts.
    """
    c = hello_parts.c
    query = (
        sa.select(c.attempt, c.hello)
        .where(c.run == run, _pending(run))
        .distinct()
        .order_by(c.attempt.desc(), c.hello)
    )
    stored = [HelloKey(run, attempt, bytes(name)) for attempt, name in connection.execute(query)]
    for named in [named for named in stored if named not in complete][most:]:
        forget(connection, named)


def read(connection: sa.Connection, named: HelloKey) -> bytes:
    """Return the joined parts of a Hello."""
    c = hello_parts.c
    query = sa.select(c.data).where(*_is(named)).order_by(c.number)
    # Fetch a few parts at a time: fetching all of them at once would block other threads.
    parts = connection.execute(query, execution_options={"yield_per": _PARTS_PER_QUERY})
    return b"".join(parts.scalars())


def forget(connection: sa.Connection, named: HelloKey) -> None:
    """Delete the parts of an unusable Hello, unless it is the Hello of the run."""
    connection.execute(sa.delete(hello_parts).where(*_is(named), _pending(named.run)))


def of_run(connection: sa.Connection, run: int) -> Hello | None:
    """Return a run's latest Hello; None if there is none, or if it is unusable."""
    c = runs.c
    row = connection.execute(sa.select(c.attempt, c.hello).where(c.key == run)).one_or_none()
    if row is None or row.hello is None:
        return None
    data = read(connection, HelloKey(run, row.attempt, bytes(row.hello)))
    if digest(data) != row.hello:
        logger.warning(
            "the Hello of the run with key %d is ignored: its stored parts were not validated", run
        )
        return None
    return blobs.unpack(data, Hello)


def _add(connection: sa.Connection, parts: Iterable[tuple[HelloKey, int, bytes]]) -> None:
    rows = [
        {"run": run, "attempt": attempt, "hello": name, "number": number, "data": data}
        for (run, attempt, name), number, data in parts
    ]
    if rows:
        connection.execute(insert(connection, hello_parts).on_conflict_do_nothing(), rows)


def _count(connection: sa.Connection, named: HelloKey) -> int:
    query = sa.select(sa.func.count()).select_from(hello_parts).where(*_is(named))
    return int(connection.execute(query).scalar_one())


def _pending(run: int) -> sa.ColumnElement[bool]:
    """Return the SQL condition for parts that do not belong to the run's current Hello."""
    c = hello_parts.c
    own = sa.select(runs.c.key).where(
        runs.c.key == run, runs.c.hello == c.hello, runs.c.attempt == c.attempt
    )
    return ~own.correlate(hello_parts).exists()


def _is(named: HelloKey) -> list[sa.ColumnElement[bool]]:
    c = hello_parts.c
    return [c.run == named.run, c.attempt == named.attempt, c.hello == named.digest]
