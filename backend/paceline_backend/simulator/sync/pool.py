"""Models a segment's batches as a pool, on the virtual clock; `paceline.core.pool` decides.

    pool = Pool(world)
    timeline = pool.run(what, model, starts, work)  # instead of `model.run(starts, work)`

First the pool decides which rank trains which batch, span by span, as if no rank waited in between.
Then the synchroniser's model runs with each rank's own number of batches. Its times are added up to
one record per rank and step, as real ranks report them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from paceline.core import pool
from paceline.wire.synchronisation import Synchronisation
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator.sync.base import (
    Bodies,
    Dealing,
    SimulatedSync,
    SimulatedTimeline,
    Work,
)
from paceline_backend.simulator.sync.sharing import Events, Queues, Takes, paces, settled


class SimulatedPool:
    """The pools of a run's segments, one after the other. For one thread."""

    def __init__(self, world: int) -> None:
        self._world = world
        # The recent time of each rank's batches; 0: unknown.
        self._pace_s = np.zeros(world)

    def run(
        self, what: Synchronisation, model: SimulatedSync, starts: Floats, work: Work
    ) -> SimulatedTimeline:
        """Run the model of the synchroniser `what`; ranks may take over each other's batches.

        `starts` is when each rank begins, [W]. The dealing of `work` records the batches that ranks
        train instead of the planned ones.
        """
        steps = len(work.work_s)
        if not (steps and self._world > 1 and work.dealing and pool.is_pooled(what)):
            return model.run(starts, work)
        now, parts = starts, []
        for first, end in _spans(what, work.first_step, steps):
            span = _part(work, first, end)
            bodies = self._share_out(now, span, first, work.dealing)
            if bodies is None:
                timeline = model.run(now, span)
                if first:
                    rounds = [replace(each, step=each.step + first) for each in timeline.rounds]
                    timeline = replace(timeline, rounds=rounds)
            else:
                work.dealing.pool(bodies)
                timeline = _reported(model.run(now, _uneven(span, bodies)), bodies)
            took_s = timeline.work_s + timeline.wait_s + timeline.communication_s
            now = now + took_s.sum(axis=0)
            parts.append(timeline)
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _share_out(self, starts: Floats, span: Work, first: int, dealing: Dealing) -> Bodies | None:
        """Return what each rank trains in a span; None: its own batches, none of them empty."""
        queues = Queues.of(span.work_s, span.samples)
        ends_at = starts + np.vstack([np.zeros(self._world), np.cumsum(queues.work_s, axis=0)])
        pace_s = paces(self._pace_s, queues.work_s)
        begun = queues.begun_before(settled(queues, ends_at, pace_s), ends_at)
        ranks = np.arange(self._world)
        takes = Takes()
        self._pace_s = pace_s[queues.count, ranks]
        if (begun < queues.count).any():
            events = Events(queues, span.samples, first, dealing)
            begun, self._pace_s = events.run(ends_at, pace_s, begun)
            takes = events.takes
        elif (queues.count == len(span.work_s)).all():
            return None
        return _bodies(span, first, queues, begun, takes)


def without_empty(work: Work) -> Work:
    """Return the same work, without steps for batches that have no samples."""
    queues = Queues.of(work.work_s, work.samples)
    return replace(
        work,
        work_s=queues.work_s,
        samples=np.take_along_axis(work.samples, queues.step, axis=0),
        steps=queues.count,
        planned=len(work.work_s),
    )


def _bodies(span: Work, first: int, queues: Queues, own: Ints, takes: Takes) -> Bodies:
    """Return each rank's batches: the first `own` of its queue, [W], then those it took over."""
    steps, world = span.work_s.shape
    taker = np.array(takes.rank, np.int64)
    count = own + np.bincount(taker, minlength=world)
    most, ranks = max(int(count.max()), 1), np.arange(world)
    mine = np.arange(min(most, steps))[:, None] < own
    batch = np.full((most, world), -1)
    step = np.full((most, world), first + steps - 1)
    work_s, samples = np.zeros((most, world)), np.zeros((most, world), np.int64)
    mine, planned = mine[: len(queues.step)], queues.step[: len(mine)]
    rows = slice(0, len(mine))
    batch[rows] = np.where(mine, (first + planned) * world + ranks, -1)
    step[rows] = np.where(mine, first + planned, first + steps - 1)
    work_s[rows] = np.where(mine, queues.work_s[: len(mine)], 0.0)
    samples[rows] = np.where(mine, np.take_along_axis(span.samples, planned, axis=0), 0)
    if len(taker):
        at = own[taker] + np.array(takes.number)
        planned, whose = np.array(takes.batch).T
        batch[at, taker] = (first + planned) * world + whose
        work_s[at, taker] = takes.work_s
        samples[at, taker] = span.samples[planned, whose]
    return Bodies(first, steps, count, batch, step, work_s, samples)


def _spans(what: Synchronisation, first_step: int, steps: int) -> Iterator[tuple[int, int]]:
    first = 0
    for k in range(steps):
        if pool.ends_span(what, first_step + k, last=k == steps - 1):
            yield first, k + 1
            first = k + 1


def _part(work: Work, first: int, end: int) -> Work:
    part, steps = slice(first, end), len(work.work_s)
    if (first, end) == (0, steps):
        return work
    return replace(
        work,
        first_step=work.first_step + first,
        work_s=work.work_s[part],
        samples=work.samples[part],
        all_reduce_s=work.all_reduce_s[part],
        epoch_end=work.epoch_end and end == steps,
    )


def _uneven(span: Work, bodies: Bodies) -> Work:
    return replace(
        span,
        work_s=bodies.work_s,
        samples=bodies.samples,
        all_reduce_s=np.zeros_like(bodies.work_s),
        dealing=None,
        steps=bodies.count,
        planned=bodies.span,
    )


def _reported(timeline: SimulatedTimeline, bodies: Bodies) -> SimulatedTimeline:
    step, last = bodies.step.copy(), bodies.first + bodies.span - 1
    # The wait at the span's end belongs to the last step.
    step[-1] = last
    ends = replace(bodies, step=step)
    of_rank = [bodies.step[:count, k].tolist() for k, count in enumerate(bodies.count.tolist())]
    rounds = []
    for each in timeline.rounds:
        mine = of_rank[each.rank]
        at = mine[each.step] if each.step < len(mine) else last
        rounds.append(each if each.step == at else replace(each, step=at))
    return SimulatedTimeline(
        bodies.reported(bodies.work_s),
        ends.reported(timeline.wait_s),
        ends.reported(timeline.communication_s),
        rounds,
    )


def _joined(parts: list[SimulatedTimeline]) -> SimulatedTimeline:
    return SimulatedTimeline(
        np.concatenate([part.work_s for part in parts]),
        np.concatenate([part.wait_s for part in parts]),
        np.concatenate([part.communication_s for part in parts]),
        [each for part in parts for each in part.rounds],
    )
