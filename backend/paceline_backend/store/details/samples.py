"""Read the assignment of samples to ranks and steps from segments that no restart discarded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import sqlalchemy as sa

from paceline_backend.store import blobs, runs
from paceline_backend.store.attempts import end_of
from paceline_backend.store.reads import Range
from paceline_backend.store.schema import segments

# Maximum number of segments whose samples one call searches.
_MOST_SEGMENTS = 2_000


def assigned(
    connection: sa.Connection,
    run: int,
    span: Range,
    ranks: Sequence[int] | None,
    sample: int | None,
    limit: int,
) -> tuple[list[dict[str, Any]], int | None]:
    """Return a pair: items of the steps in `span`, and the step at which the next call continues.

    There is one item per step and rank, with the rank's samples. The second value is None if no
    step is left. With `sample`, only ranks that have this sample in a step are included. `limit`
    is the maximum number of items, but the ranks of a step are never split between two calls, so
    there may be a few more.
    """
    items: list[dict[str, Any]] = []
    first, last = span
    looked = 0
    for attempt, plan, end in effective(connection, run, first or 0, last):
        looked += 1
        begin = max(plan.first_step, first or 0)
        if len(items) >= limit or looked > _MOST_SEGMENTS:
            return items, begin
        of_steps = plan.assignment.parts
        for step in range(begin, end if last is None else min(end, last + 1)):
            if len(items) >= limit:
                return items, step
            for rank, samples in enumerate(of_steps[step - plan.first_step]):
                if ranks is not None and rank not in ranks:
                    continue
                if sample is not None and not np.any(samples == sample):
                    continue
                where = {"step": step, "epoch": plan.epoch, "attempt": attempt, "rank": rank}
                items.append({**where, "samples": samples.tolist()})
    return items, None


def effective(
    connection: sa.Connection, run: int, first: int, last: int | None
) -> Iterator[tuple[int, Any, int]]:
    """Yield (attempt, segment, end): `end` is one past the last step that no restart discarded."""
    c = segments.c
    begins = sa.select(c.attempt, sa.func.min(c.first_step)).where(c.run == run).group_by(c.attempt)
    starts = {int(attempt): int(step) for attempt, step in connection.execute(begins)}
    hello = runs.hello(connection, run)
    if hello is not None:
        starts[hello.attempt] = hello.step
    query = sa.select(c.attempt, c.body).where(c.run == run, c.first_step + c.steps > first)
    if last is not None:
        query = query.where(c.first_step <= last)
    query = query.order_by(c.first_step, c.attempt).execution_options(yield_per=200)
    for attempt, body in connection.execute(query):
        plan = blobs.plan(body, None, None if hello is None else hello.samples)
        if plan is None:
            continue
        limit = end_of(attempt, starts)
        end = plan.first_step + plan.steps
        end = end if limit is None else min(end, limit)
        if end > max(plan.first_step, first):
            yield attempt, plan, end
