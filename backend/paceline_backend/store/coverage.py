"""Count how often each epoch used each sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from paceline.wire import ENDED, Hello, Plan
from paceline_backend.store import blobs, rounds, runs
from paceline_backend.store.attempts import end_of, present
from paceline_backend.store.schema import runs as runs_table
from paceline_backend.store.schema import segments, steps, worker_steps

Ints = npt.NDArray[np.int64]

# A script may report any epoch number. If the numbers span more than this, only epochs with
# segments are listed.
_MOST_EPOCHS = 100_000


@dataclass(frozen=True)
class Effective:
    """A segment with steps that no restart discarded (see `store.attempts`).

    `end` is the exclusive end of the steps that no restart discarded.
    """

    attempt: int
    plan: Plan
    end: int

    @property
    def whole(self) -> bool:
        """Return whether no step of the segment was discarded."""
        return self.end == self.plan.first_step + self.plan.steps


def effective(connection: sa.Connection, run: int, hello: Hello | None) -> Iterator[Effective]:
    """Yield a run's segments, except those that restarts discarded, in the order of their steps.

    `hello` is the Hello of the latest attempt, if there was an attempt.
    """
    first = sa.func.min(segments.c.first_step)
    rows = connection.execute(
        sa.select(segments.c.attempt, first)
        .where(segments.c.run == run)
        .group_by(segments.c.attempt)
    )
    starts = {int(attempt): int(step) for attempt, step in rows}
    if hello is not None:
        starts[hello.attempt] = hello.step
    ends = {attempt: end_of(attempt, starts) for attempt in starts}
    latest, samples = (None, None) if hello is None else (hello.attempt, hello.samples)
    terms = (None if hello is None else hello.world, samples)
    bodies = connection.execute(
        sa.select(segments.c.attempt, segments.c.body)
        .where(segments.c.run == run)
        .order_by(segments.c.attempt, segments.c.seq)
    )
    for attempt, body in bodies:
        plan = blobs.plan(body, *(terms if attempt == latest else (None, samples)))
        if plan is None:
            continue
        end, limit = plan.first_step + plan.steps, ends[attempt]
        end = end if limit is None else min(end, limit)
        if end > plan.first_step:
            yield Effective(attempt, plan, end)


def coverage(connection: sa.Connection, run: int) -> dict[str, Any]:
    """Count how often each epoch used its samples; `exact` means that each was used once.

    The length of a stream is unknown, so its epoch counts as having the samples from number 0 to
    the greatest number that any rank used.

    An epoch is complete when every rank has reported the epoch's last step or a later one. An
    incomplete epoch with missing samples still counts as exact in two cases: it is the last epoch;
    or the run has not ended and the epoch's last segment is stored, because records of the missing
    samples may still arrive.

    A sample counts as used when the rank that it was assigned to reported the step. A sample
    also counts if the checkpoint of the latest attempt lists it as used, because the records of its
    step may have been lost with a rank. `dropped` counts used samples whose gradients relaxed
    synchronisation did not apply.
    """
    hello = runs.hello(connection, run)
    if hello is None:
        return {"epochs": [], "exact": False, "dropped": 0}
    samples = hello.samples
    # Samples used in each epoch, with repetitions.
    uses: dict[int, list[Ints]] = defaultdict(list)
    ended: set[int] = set()
    complete: set[int] = set()
    state = connection.execute(
        sa.select(runs_table.c.state).where(runs_table.c.key == run)
    ).scalar()
    reported_until = _reported_until(connection, run, hello)
    reported = _reported(connection, run, hello)
    too_old = rounds.dropped(connection, run)
    dropped: dict[int, int] = defaultdict(int)
    resumed = False
    for part in effective(connection, run, hello):
        plan = part.plan
        if part.attempt == hello.attempt and not resumed:
            _resume(uses, hello)
            resumed = True
        used = _used(connection, run, part, reported)
        uses[plan.epoch].append(used)
        dropped[plan.epoch] += too_old.get((part.attempt, plan.seq), 0)
        if plan.epoch_end and part.whole:
            ended.add(plan.epoch)
            if part.attempt < hello.attempt or part.end <= reported_until or state == "finished":
                complete.add(plan.epoch)
    rest = (samples or 0) % hello.global_batch if hello.drop_last else 0
    allowed = range(rest, rest + 1)
    # For a stream, it is unknown how many samples `drop_last` drops at the end of an epoch.
    if samples is None and hello.drop_last:
        allowed = range(hello.global_batch)
    if not uses:
        return {"epochs": [], "exact": False, "dropped": 0}
    last = max(uses)
    unfinished = {last} if state in ENDED else {last} | ended
    first = min(hello.epoch, *uses)
    listed = last - first < _MOST_EPOCHS
    epochs = [
        _epoch(epoch, uses[epoch], samples, epoch in complete, epoch in unfinished, allowed)
        | {"dropped": dropped[epoch]}
        for epoch in (range(first, last + 1) if listed else sorted(uses))
    ]
    return {
        "epochs": epochs,
        "exact": listed and all(epoch["exact"] for epoch in epochs),
        "dropped": sum(epoch["dropped"] for epoch in epochs),
    }


def _reported_until(connection: sa.Connection, run: int, hello: Hello) -> int:
    """Return the exclusive end of the steps that all ranks of the latest attempt have reported."""
    since = hello.step
    # With a single attempt, every complete step belongs to it. Starting at the newest complete step
    # avoids reading millions of earlier rows.
    if hello.attempt == 0:
        newest_complete = sa.select(sa.func.max(steps.c.step)).where(steps.c.run == run)
        since = max(since, connection.execute(newest_complete).scalar() or 0)
    newest = connection.execute(
        sa.select(sa.func.max(worker_steps.c.step))
        .where(worker_steps.c.run == run, worker_steps.c.step >= since)
        .where(worker_steps.c.attempt == hello.attempt, *present(hello.attempt, hello.world))
        .group_by(worker_steps.c.rank)
    ).scalars()
    newest_steps = [int(step) for step in newest]
    return min(newest_steps) + 1 if len(newest_steps) == hello.world else hello.step


def _resume(uses: dict[int, list[Ints]], hello: Hello) -> None:
    used = np.frombuffer(hello.used, dtype="<u4").astype(np.int64)
    if len(used):
        uses[hello.epoch].append(np.setdiff1d(used, _together(uses[hello.epoch])))


def _together(parts: list[Ints]) -> Ints:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _reported(
    connection: sa.Connection, run: int, hello: Hello
) -> dict[tuple[int, int], tuple[int, int, int]]:
    """Return, by (attempt, segment), the number of records and their first and last step.

    In most cases these numbers suffice to decide that all records of a segment have arrived.
    """
    # With a single attempt, `steps` has the same numbers in fewer rows: one per complete step.
    if hello.attempt == 0:
        c = steps.c
        complete = connection.execute(
            sa.select(c.segment, sa.func.sum(c.workers), sa.func.min(c.step), sa.func.max(c.step))
            .where(c.run == run)
            .group_by(c.segment)
        )
        return {(0, row[0]): (int(row[1]), row[2], row[3]) for row in complete}
    c = worker_steps.c
    rows = connection.execute(
        sa.select(c.attempt, c.segment, sa.func.count(), sa.func.min(c.step), sa.func.max(c.step))
        .where(c.run == run)
        .group_by(c.attempt, c.segment)
    )
    return {(row[0], row[1]): (row[2], row[3], row[4]) for row in rows}


def _used(
    connection: sa.Connection,
    run: int,
    part: Effective,
    reported: dict[tuple[int, int], tuple[int, int, int]],
) -> Ints:
    plan = part.plan
    world = len(plan.counts[0])
    everything = (plan.steps * world, plan.first_step, part.end - 1)
    if part.whole and reported.get((part.attempt, plan.seq)) == everything:
        return plan.assignment.samples
    rows = connection.execute(
        sa.select(worker_steps.c.step, worker_steps.c.rank).where(
            worker_steps.c.run == run,
            worker_steps.c.step >= plan.first_step,
            worker_steps.c.step < part.end,
            worker_steps.c.attempt == part.attempt,
            worker_steps.c.segment == plan.seq,
        )
    )
    of_steps = plan.assignment.parts
    parts = [of_steps[step - plan.first_step][rank] for step, rank in rows if 0 <= rank < world]
    return _together(parts)


def _epoch(
    epoch: int,
    parts: list[Ints],
    samples: int | None,
    complete: bool,
    unfinished: bool,
    allowed: range,
) -> dict[str, Any]:
    """Count how often one epoch used its samples.

    `parts` are the used samples, with repetitions. `samples` is the size of the data set, None for
    a stream. `allowed` has the possible numbers of samples that `drop_last` drops: a complete epoch
    with one of these numbers of missing samples is still exact. `unfinished` says whether an
    incomplete epoch counts as exact.

    A rank of a stream may report an arbitrarily large sample number. So the memory that this
    function needs depends only on the number of used samples, not on their numbers.
    """
    numbers, uses = np.unique(_together(parts), return_counts=True)
    distinct = len(numbers)
    read = int(numbers[-1]) + 1 if distinct else 0
    if samples is None or samples < read:
        samples = read
    missing = samples - distinct
    duplicated = int(np.count_nonzero(uses > 1))
    full = missing in allowed if complete else unfinished
    return {
        "epoch": epoch,
        "samples": samples,
        "used": int(uses.sum()),
        "distinct": distinct,
        "missing": missing,
        "duplicated": duplicated,
        "complete": complete,
        "exact": full and duplicated == 0,
    }
