"""Find the steps of each attempt that still count after restarts.

An attempt starts at the step of its checkpoint, or at step 0 without a checkpoint. If earlier
attempts have trained this step and later ones, the new attempt discards these steps, because its
model does not contain their updates. The rows of discarded steps stay in the database until the
steps are trained again, but they no longer count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from paceline_backend.store.schema import attempts, segments, steps, worker_steps


@dataclass(frozen=True)
class AttemptSpan:
    """A range of steps that still count, of one attempt or of several consecutive attempts.

    Args:
        attempt: the latest of these attempts; None: rows of any attempt count.
        end: one past the last step; None: no limit.
        before: number of attempts directly before `attempt` whose rows in the range count, too.
    """

    attempt: int | None
    first: int
    end: int | None
    before: int = 0

    def rows(
        self,
        step: sa.Column[Any] = worker_steps.c.step,
        attempt: sa.Column[Any] = worker_steps.c.attempt,
    ) -> list[sa.ColumnElement[bool]]:
        """Return the SQL conditions that select the rows of these steps."""
        where = [step >= self.first]
        if self.attempt is not None:
            where.append(attempt.between(self.attempt - self.before, self.attempt))
        if self.end is not None:
            where.append(step < self.end)
        return where


def present(
    attempt: int | None, world: int | None, table: sa.Table = worker_steps
) -> list[sa.ColumnElement[bool]]:
    """Return the SQL condition that excludes rows of ranks that the latest attempt does not have.

    Such rows can exist, because records can arrive before the Hello with the number of ranks. Rows
    of earlier attempts are never excluded, because those may have had more ranks. `attempt` is the
    latest attempt and `world` its number of ranks; each is None if unknown. `table` is
    `worker_steps` or `rank_rollups`.
    """
    if attempt is None or world is None:
        return []
    return [sa.or_(table.c.attempt != attempt, table.c.rank < world)]


def end_of(attempt: int, starts: Mapping[int, int]) -> int | None:
    """Return the step from which later attempts discard an attempt's steps; None if none does.

    `starts` maps each attempt to its first step.
    """
    return min((step for other, step in starts.items() if other > attempt), default=None)


def spans(connection: sa.Connection, run: int, attempt: int | None) -> list[AttemptSpan]:
    """Return the range of each attempt's steps that no restart discarded, latest attempt first.

    `attempt` is the latest attempt, None if it is not known yet. The number of index seeks grows
    with the number of attempts, not with the length of the run.
    """
    if not attempt:
        return [AttemptSpan(None, 0, None)]
    starts: dict[int, int] = {}
    counting = []
    number: int | None = attempt
    while number is not None:
        adopted = sa.select(segments.c.first_step, segments.c.steps).where(
            segments.c.run == run, segments.c.attempt == number
        )
        first = connection.execute(adopted.order_by(segments.c.seq).limit(1)).scalar()
        end = end_of(number, starts)
        if number == attempt and first is None:
            first = _hello_step(connection, run)
        elif number == attempt:
            # An attempt trains only the steps of its adopted segments, so rows of steps after these
            # segments belong to an earlier attempt.
            last = connection.execute(adopted.order_by(segments.c.seq.desc()).limit(1)).one()
            end = last.first_step + last.steps
        if first is not None:
            starts[number] = first
        if end is None or end > (first or 0):
            counting.append(AttemptSpan(number, first or 0, end))
        if first == 0:
            break
        below = _adopting(connection, run, number)
        # The attempts between `below` and `number` adopted no segment. There can be many of them,
        # because a relaunch after the loss of the rendezvous host skips 1,000 attempt numbers.
        unused = number - 1 - (-1 if below is None else below)
        end = end_of(number - 1, starts)
        if unused and (end is None or end > 0):
            counting.append(AttemptSpan(number - 1, 0, end, unused - 1))
        number = below
    return counting


def _adopting(connection: sa.Connection, run: int, below: int) -> int | None:
    c = segments.c
    newest = sa.select(sa.func.max(c.attempt)).where(c.run == run, c.attempt < below)
    return connection.execute(newest).scalar()


def starts(connection: sa.Connection, run: int) -> list[dict[str, Any]]:
    """Return the first step of each attempt and the number of steps (`again`) that it repeats."""
    c = attempts.c
    again = sa.case((c.reached > c.step, c.reached - c.step), else_=0).label("again")
    query = sa.select(c.attempt, c.started_at, c.step, c.reached, again).where(c.run == run)
    return [dict(row) for row in connection.execute(query.order_by(c.attempt)).mappings()]


def newest(connection: sa.Connection, run: int, parts: Sequence[AttemptSpan]) -> sa.Row[Any] | None:
    """Return `step` and `ended_at` of the ranks' newest record that no restart has discarded."""
    c = worker_steps.c
    return _first(
        connection,
        sa.select(c.step, c.ended_at).where(c.run == run).order_by(c.step.desc()),
        parts,
    )


def newest_complete(
    connection: sa.Connection, run: int, parts: Sequence[AttemptSpan]
) -> sa.Row[Any] | None:
    """Return `step` and `epoch` of the newest complete step that no restart discarded."""
    # `steps` has no column `attempt`, so take it from a rank's record. All ranks of a complete step
    # have the same attempt.
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
    connection: sa.Connection, query: sa.Select[Any], parts: Sequence[AttemptSpan]
) -> sa.Row[Any] | None:
    """Return the first row of the query, trying the latest attempt first; None if there is none.

    Steps that count for a later attempt come after all steps that count for an earlier one. So if
    the latest attempt has a row, no earlier attempt has a newer one.
    """
    for part in parts:
        row = connection.execute(query.where(*part.rows()).limit(1)).one_or_none()
        if row is not None:
            return row
    return None


def _hello_step(connection: sa.Connection, run: int) -> int | None:
    c = attempts.c
    query = sa.select(c.step).where(c.run == run).order_by(c.attempt.desc()).limit(1)
    step: int | None = connection.execute(query).scalar()
    return step


@dataclass(frozen=True)
class Placement:
    """Assignment of ranks to nodes.

    `nodes` has the name of each rank's node, [ranks]. The assignment began at step `since`, and
    `attempt` is the latest attempt with this assignment.
    """

    nodes: Sequence[str]
    since: int
    attempt: int


def placement(connection: sa.Connection, run: int, step: int | None = None) -> Placement | None:
    """Return the nodes on which a run's ranks train a step; None if unknown.

    `step` is None for the newest step.
    """
    c = attempts.c
    query = sa.select(c.attempt, c.step, c.placement).where(c.run == run)
    if step is not None:
        query = query.where(c.step <= step)
    latest: Placement | None = None
    for row in connection.execute(query.order_by(c.attempt.desc())):
        if latest is None and row.placement:
            latest = Placement(row.placement, row.step, row.attempt)
        elif latest is None or row.placement != latest.nodes:
            break
        else:
            latest = Placement(latest.nodes, min(latest.since, row.step), latest.attempt)
    return latest


def devices(connection: sa.Connection, run: int) -> list[dict[str, Any]]:
    """Return each rank's `wire.RankDevice` in a run's latest attempt, [ranks]; empty if unknown."""
    c = attempts.c
    query = sa.select(c.devices).where(c.run == run).order_by(c.attempt.desc()).limit(1)
    return list(connection.execute(query).scalar() or [])


def elsewhere(connection: sa.Connection, run: int, nodes: Sequence[str]) -> list[int]:
    """Return the attempts whose placement is known and differs from `nodes` (each rank's node)."""
    known = placements(connection, run, -1) if nodes else []
    return [attempt for attempt, _, placed in known if placed and placed != list(nodes)]


def placements(connection: sa.Connection, run: int, above: int) -> list[tuple[int, int, list[str]]]:
    """Return (attempt, first step, each rank's node) of attempts after `above`, oldest first."""
    c = attempts.c
    query = sa.select(c.attempt, c.step, c.placement).where(c.run == run, c.attempt > above)
    rows = connection.execute(query.order_by(c.attempt))
    return [(row.attempt, row.step, row.placement or []) for row in rows]


def mean_time(
    connection: sa.Connection, run: int, first: int, end: int | None, count: int
) -> tuple[float | None, int]:
    """Return the mean duration of the complete steps in a range, in seconds, and their number.

    The range begins at step `first` and ends before step `end`; if `end` is None, before step
    `first + count`. Only the first `count` complete steps of the range are used. If the range has
    no complete step, the mean is None.
    """
    c = steps.c
    where = [c.run == run, c.step >= first, c.step < (first + count if end is None else end)]
    times = sa.select(c.step_s).where(*where).order_by(c.step).limit(count).subquery().c
    query = sa.select(sa.func.avg(times.step_s), sa.func.count())
    mean, number = connection.execute(query).one()
    return mean, number
