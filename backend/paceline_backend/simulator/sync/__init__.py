"""Models of gradient synchronisation on the virtual clock.

`make` returns the model for the `Synchronisation` in a segment's plan. `step_time_s` computes the
step time under a synchronisation from the measured times of the ranks' work.
"""

from __future__ import annotations

import numpy as np

from paceline.core import replicas
from paceline.core.rounds import Call, Drift
from paceline.policies.base import Floats, Ints
from paceline.wire import ALLREDUCE, synchronisation
from paceline_backend.simulator.sync.base import (
    Bodies,
    Costs,
    Dealing,
    Prices,
    SimulatedRound,
    SimulatedSync,
    SimulatedTimeline,
    Work,
)
from paceline_backend.simulator.sync.pairwise import SimulatedPairwise
from paceline_backend.simulator.sync.pool import SimulatedPool, without_empty
from paceline_backend.simulator.sync.rounds import SimulatedHierarchical, SimulatedPartial
from paceline_backend.simulator.sync.together import SimulatedAllReduce, SimulatedAveraging

__all__ = [
    "Bodies",
    "Costs",
    "Dealing",
    "Prices",
    "SimulatedPool",
    "SimulatedRound",
    "SimulatedSync",
    "SimulatedTimeline",
    "Work",
    "goes_on",
    "make",
    "step_time_s",
    "without_empty",
]


def make(what: synchronisation.Synchronisation, world: int, seed: int) -> SimulatedSync:
    """Make the model of a segment's synchronisation for `world` ranks.

    If `seed` is the run's seed plus the segment's number, random draws are those of real ranks.
    """
    match what:
        case synchronisation.AllReduce():
            return SimulatedAllReduce()
        case synchronisation.Averaging(rules):
            return SimulatedAveraging(rules.every, rules.parts, rules.overlap, rules.keep)
        case synchronisation.Pairwise():
            return SimulatedPairwise(world, seed)
        case synchronisation.Partial(rules):
            call = Call.of(rules, world, seed)
            return SimulatedPartial(call, Drift.of(rules))
        case synchronisation.Hierarchical(rules):
            drift = Drift.of(rules)
            return SimulatedHierarchical(
                (group, SimulatedPartial(Call.of(rules, len(group), seed), drift))
                for group in replicas.ordered_groups(rules.groups)
            )


def goes_on(what: synchronisation.Synchronisation) -> bool:
    """Return True if ranks synchronise only at an epoch's end, and not at each segment's end."""
    return make(what, 1, 0).goes_on


def step_time_s(
    what: synchronisation.Synchronisation,
    work_s: Floats,
    costs: Costs,
    segment_steps: int,
    *,
    samples: Ints | None = None,
) -> float:
    """Return the mean time of a step under a synchronisation, computed from measured work.

    The result is the time until all ranks have ended ÷ the number of steps. Where ranks take over
    batches from each other, all samples of a rank's step count as equally expensive.

    Args:
        work_s: each rank's time for loading and computing each step, without exchanges, [S, W].
        costs: measured costs of exchanges.
        segment_steps: number of steps of a segment. All ranks synchronise at the segment's end
            unless `goes_on` is true for the synchronisation.
        samples: number of samples of each step and rank, [S, W]; None: no batch is empty.
    """
    steps, world = work_s.shape
    work_s = work_s if what == ALLREDUCE else work_s + costs.own_s
    samples = np.ones(work_s.shape, np.int64) if samples is None else samples
    all_reduce_s = np.full(work_s.shape, costs.round_s)
    model, now = make(what, world, 0), np.zeros(world)
    pool = SimulatedPool(world)
    for number, first in enumerate(range(0, steps, segment_steps)):
        part = slice(first, first + segment_steps)
        if not model.goes_on:
            model = make(what, world, number)
        last = part.stop >= steps
        dealing = _Alike(work_s[part], samples[part])
        work = Work(first, work_s[part], samples[part], all_reduce_s[part], costs, last, dealing)
        timeline = pool.run(what, model, now, work)
        now = now + (timeline.work_s + timeline.wait_s + timeline.communication_s).sum(axis=0)
    return float(now.max() / steps)


class _Alike:
    """A `Dealing` in which all samples of a rank's step take the same time."""

    def __init__(self, work_s: Floats, samples: Ints) -> None:
        self._work_s, self._samples = work_s, samples
        self._sample_s = work_s / np.maximum(samples, 1)
        self._step_s = work_s - samples * self._sample_s

    def room(self, rank: int) -> int:
        return 2**31

    def prices(self, at: int) -> Prices:
        world = self._samples.shape[1]
        mean_s = self._work_s.sum(axis=0) / np.maximum(self._samples.sum(axis=0), 1)
        usual = self._samples[at] > 0
        sample_s = np.where(usual, self._sample_s[at], mean_s)
        step_s = np.where(usual, self._step_s[at], 0.0)
        return Prices(np.zeros(world), np.zeros(world), sample_s, step_s)

    def pool(self, bodies: Bodies) -> None:
        pass
