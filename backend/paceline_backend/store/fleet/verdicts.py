"""Store the history of runs' verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.schema import verdicts


@dataclass(frozen=True)
class Kept:
    """A verdict with the period in which its causes did not change; see the table `verdicts`.

    `run` is the public id.
    """

    run: str
    at: float
    until: float
    workers: int
    nodes: Mapping[str, Mapping[str, Any]]
    body: Mapping[str, Any]


@dataclass(frozen=True)
class NamedNodes:
    """Nodes that a verdict named, with the period of the verdict in Unix time."""

    at: float
    until: float
    nodes: tuple[str, ...]


_COLUMNS = [verdicts.c[name] for name in Kept.__dataclass_fields__]


def newest(connection: sa.Connection, runs: Sequence[str]) -> dict[str, Kept]:
    """Return the newest verdict of each run, by public id; runs without a verdict are left out."""
    c = verdicts.c
    last = sa.select(c.run, sa.func.max(c.at).label("at")).where(c.run.in_(runs))
    of = last.group_by(c.run).subquery()
    query = sa.select(*_COLUMNS).join(of, (of.c.run == c.run) & (of.c.at == c.at))
    return {row.run: Kept(*row) for row in connection.execute(query)}


def keep(connection: sa.Connection, made: Kept, gap_s: float) -> None:
    """Store a verdict: extend the newest row if it names the same causes, else add a row.

    `made` is the new verdict; its `at` and `until` are both the time of the verdict. A row whose
    period ended more than `gap_s` seconds before the verdict is not extended.
    """
    before = newest(connection, [made.run]).get(made.run)
    row = dict(vars(made))
    recent = before is not None and made.until - before.until < gap_s
    if before is None or not recent or causes_of(before) != causes_of(made):
        connection.execute(sa.insert(verdicts).values(row))
        return
    c = verdicts.c
    mine = (c.run == made.run, c.at == before.at)
    connection.execute(sa.update(verdicts).where(*mine).values({**row, "at": before.at}))


def go_on(connection: sa.Connection, run: str, at: float, gap_s: float) -> None:
    """Extend the period of a run's newest verdict to `at`, because its causes are unchanged.

    A verdict whose period ended more than `gap_s` seconds before `at` is not extended.
    """
    c = verdicts.c
    last = sa.select(sa.func.max(c.at)).where(c.run == run).scalar_subquery()
    mine = (c.run == run, c.at == last, c.until > at - gap_s, c.until < at)
    connection.execute(sa.update(verdicts).where(*mine).values(until=at))


def causes_of(kept: Kept) -> set[tuple[str, tuple[int, ...], bool]]:
    """Return the causes of a verdict for comparison: kind, ranks, and whether still active."""
    return {
        (cause["kind"], tuple(cause["ranks"]), cause["until"] is None)
        for cause in kept.body["causes"]
    }


def between(connection: sa.Connection, since: float, until: float) -> list[NamedNodes]:
    """Return the nodes that verdicts named within a range of Unix times, oldest first."""
    c = verdicts.c
    query = sa.select(c.at, c.until, c.nodes).where(c.until > since, c.at < until)
    rows = connection.execute(query.order_by(c.at, c.run))
    return [NamedNodes(row.at, row.until, tuple(row.nodes)) for row in rows if row.nodes]


def forget(connection: sa.Connection, before: float) -> None:
    """Delete verdicts that ended before a Unix time."""
    connection.execute(sa.delete(verdicts).where(verdicts.c.until < before))
