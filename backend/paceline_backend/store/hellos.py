"""The Hellos of runs: the latest attempt's of each, and parts of one that is on its way.

A Hello is stored in parts (`wire.parts`), not in the run's row: SQLite writes a whole row anew with
each change, and a Hello may have hundreds of megabytes. `add` stores parts as they come and returns
the Hellos that are complete. Ingest then reads such a Hello (`read`), checks it and has it written
like one that came whole (`write`), for which nothing large is written again. `of_run` reads the
Hello that the run's row names, and leaves it out if its parts are not those that were checked.
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

_MOST_PENDING = 2  # Hellos of a run that are not complete; those of earlier attempts go first
_AT_ONCE = 16  # parts that are fetched together

logger = logging.getLogger(__name__)


class HelloKey(NamedTuple):
    """A Hello on its way."""

    run: int  # key
    attempt: int
    digest: bytes


class PackedHello(NamedTuple):
    """A Hello as it is stored, after it was checked."""

    digest: bytes
    parts: list[bytes] | int  # or how many, where they are stored already


def pack(hello: Hello) -> PackedHello:
    """Return a Hello as `write` takes it; outside a transaction, since it may take a while."""
    data = blobs.pack(hello)
    cuts = range(0, len(data), PART_BYTES)
    return PackedHello(digest(data), [data[at : at + PART_BYTES] for at in cuts])


def write(connection: sa.Connection, run: int, attempt: int, packed: PackedHello) -> None:
    """Store a run's latest Hello, whose digest the run's row gets, and forget earlier ones.

    Raises:
        StoreRefusedError: parts that were stored are there no longer.
    """
    named = HelloKey(run, attempt, packed.digest)
    if isinstance(packed.parts, int):
        if _count(connection, named) != packed.parts:
            raise StoreRefusedError("parts of a Hello were deleted before it could be used")
    else:
        connection.execute(sa.delete(hello_parts).where(*_is(named)))  # nobody has checked them
        _add(connection, [(named, number, data) for number, data in enumerate(packed.parts)])
    c = hello_parts.c
    older = sa.or_(c.attempt < attempt, sa.and_(c.attempt == attempt, c.hello != packed.digest))
    connection.execute(sa.delete(hello_parts).where(c.run == run, older))


def add(connection: sa.Connection, parts: Iterable[tuple[int, HelloPart]]) -> list[HelloKey]:
    """Store parts; return the Hellos of these parts that are complete now.

    Args:
        connection: of the transaction.
        parts: each with its run's key.
    """
    named_parts = [(HelloKey(run, part.attempt, part.hello), part) for run, part in parts]
    _add(connection, [(named, part.number, part.data) for named, part in named_parts])
    sizes = {named: part.of for named, part in named_parts}
    complete = [named for named, of in sizes.items() if _count(connection, named) == of]
    for run in {named.run for named in sizes}:
        bound(connection, run, complete)
    return complete


def bound(
    connection: sa.Connection, run: int, complete: Collection[HelloKey], most: int = _MOST_PENDING
) -> None:
    """Forget Hellos of a run that it does not complete, so that they do not fill the database.

    Args:
        connection: of the transaction.
        run: its key.
        complete: Hellos that stay, as they are checked next.
        most: how many others stay.
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
    """Return what the parts of a Hello make together."""
    c = hello_parts.c
    query = sa.select(c.data).where(*_is(named)).order_by(c.number)
    # A few at once: to fetch all of them would keep other threads from running.
    parts = connection.execute(query, execution_options={"yield_per": _AT_ONCE})
    return b"".join(parts.scalars())


def forget(connection: sa.Connection, named: HelloKey) -> None:
    """Delete the parts of a Hello that cannot be used, unless it is the run's own."""
    connection.execute(sa.delete(hello_parts).where(*_is(named), _pending(named.run)))


def of_run(connection: sa.Connection, run: int) -> Hello | None:
    """Return a run's latest Hello; None if there is none, or none that can be used."""
    c = runs.c
    row = connection.execute(sa.select(c.attempt, c.hello).where(c.key == run)).one_or_none()
    if row is None or row.hello is None:
        return None
    data = read(connection, HelloKey(run, row.attempt, bytes(row.hello)))
    if digest(data) != row.hello:
        logger.warning("the Hello of run %d is left out: its parts are not those checked", run)
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
    """Select parts of a run that are not of its own Hello."""
    c = hello_parts.c
    own = sa.select(runs.c.key).where(
        runs.c.key == run, runs.c.hello == c.hello, runs.c.attempt == c.attempt
    )
    return ~own.correlate(hello_parts).exists()


def _is(named: HelloKey) -> list[sa.ColumnElement[bool]]:
    c = hello_parts.c
    return [c.run == named.run, c.attempt == named.attempt, c.hello == named.digest]
