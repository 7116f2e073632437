"""Which steps count when the ranks were started again.

An attempt that starts at an earlier step, from a checkpoint or from nothing, undoes what attempts
before it did from there on: none of that is in the model any more. Its rows stay until the same
steps have been trained again, but they no longer count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.store import blobs, refusals
from paceline_backend.store.schema import runs, segments, steps, worker_steps


@dataclass(frozen=True)
class Span:
    """The steps of an attempt that count."""

    attempt: int | None  # None: whichever it is
    first: int
    end: int | None  # one past the last; None: open

    def rows(
        self,
        step: sa.Column[Any] = worker_steps.c.step,
        attempt: sa.Column[Any] = worker_steps.c.attempt,
    ) -> list[sa.ColumnElement[bool]]:
        """The condition for rows of `worker_steps`, or of another table with these two columns."""
        where = [step >= self.first]
        if self.attempt is not None:
            where.append(attempt == self.attempt)
        if self.end is not None:
            where.append(step < self.end)
        return where


def present(attempt: int | None, world: int | None) -> list[sa.ColumnElement[bool]]:
    """The condition for records of ranks that the latest attempt has; older releases stored any.

    Args:
        attempt: the latest; None: not known yet.
        world: its ranks. Attempts before may have had more.
    """
    c = worker_steps.c
    possible = c.rank.between(0, refusals.MOST_RANKS - 1)
    if attempt is None or world is None:
        return [possible]
    return [possible, sa.or_(c.attempt != attempt, c.rank < world)]


def end_of(attempt: int, starts: Mapping[int, int]) -> int | None:
    """One past the last step of an attempt that may count: where a later one started. None: any.

    Args:
        attempt: which.
        starts: attempt → its first step.
    """
    return min((step for other, step in starts.items() if other > attempt), default=None)


def spans(connection: sa.Connection, run: int, attempt: int | None) -> list[Span]:
    """What counts of each attempt, the latest first. A few seeks, however long the run.

    Args:
        connection: to read from.
        run: key of the run.
        attempt: the latest; None: not known yet.
    """
    if not attempt:
        return [Span(None, 0, None)]
    starts: dict[int, int] = {}
    counting = []
    for number in range(attempt, -1, -1):
        adopted = sa.select(segments.c.first_step, segments.c.steps).where(
            segments.c.run == run, segments.c.attempt == number
        )
        first = connection.execute(adopted.order_by(segments.c.seq).limit(1)).scalar()
        end = end_of(number, starts)
        if number == attempt and first is None:
            first = _hello_step(connection, run)
        elif number == attempt:
            # Rows beyond the steps that it has adopted are an earlier attempt's.
            last = connection.execute(adopted.order_by(segments.c.seq.desc()).limit(1)).one()
            end = last.first_step + last.steps
        if first is not None:
            starts[number] = first
        if end is None or end > (first or 0):
            counting.append(Span(number, first or 0, end))
        if first == 0:
            break
    return counting


def newest(connection: sa.Connection, run: int, parts: Sequence[Span]) -> sa.Row[Any] | None:
    """The newest record that counts, of any rank: `step`, `ended_at`."""
    c = worker_steps.c
    return _first(
        connection,
        sa.select(c.step, c.ended_at).where(c.run == run).order_by(c.step.desc()),
        parts,
    )


def newest_complete(
    connection: sa.Connection, run: int, parts: Sequence[Span]
) -> sa.Row[Any] | None:
    """The newest step that counts and that all ranks reported: `step`, `epoch`."""
    # Any rank's row tells of which attempt a complete step is.
    c = worker_steps.c
    return _first(
        connection,
        sa.select(steps.c.step, steps.c.epoch)
        .join(worker_steps, (c.run == steps.c.run) & (c.step == steps.c.step))
        .where(c.run == run, c.rank == 0)
        .order_by(c.step.desc()),
        parts,
    )


def _first(
    connection: sa.Connection, query: sa.Select[Any], parts: Sequence[Span]
) -> sa.Row[Any] | None:
    """A later attempt's steps that count are all behind an earlier one's."""
    for part in parts:
        row = connection.execute(query.where(*part.rows()).limit(1)).one_or_none()
        if row is not None:
            return row
    return None


def _hello_step(connection: sa.Connection, run: int) -> int | None:
    data = connection.execute(sa.select(runs.c.hello).where(runs.c.key == run)).scalar()
    hello = None if data is None else blobs.hello(data)
    return None if hello is None else hello.step
