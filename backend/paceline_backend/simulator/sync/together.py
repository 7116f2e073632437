"""Synchronisers under which each rank waits for all others: in each step, or now and then."""

from __future__ import annotations

import numpy as np

from paceline.core.means import part_due
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.simulator.sync.base import Costs, Round, Timeline, Work


class AllReduce:
    """A step ends for all ranks at once: the slowest has computed, and the all-reduce is over."""

    goes_on = False

    def run(self, starts: Floats, work: Work) -> Timeline:
        """See `Synchroniser.run`."""
        wait_s = work.work_s.max(axis=1, keepdims=True) - work.work_s
        return Timeline(work.work_s, wait_s, work.all_reduce_s, [])

    def meet(self, starts: Floats, costs: Costs) -> float:
        """See `Synchroniser.meet`."""
        return float(starts.max())


class Averaging:
    """Each rank steps alone. Every few steps all meet, and replicas become their mean.

    Args:
        every: steps between two means (H of local SGD), counted over the run; None: replicas
            become their mean only at an epoch's end.
        parts: of the parameters, which have their means in turn.
    """

    goes_on = True

    def __init__(self, every: int | None, parts: int = 1) -> None:
        self._every, self._parts = every, parts
        self._worked: Floats | None = None  # [P, W] samples since each part's previous mean
        self._means = 0

    def run(self, starts: Floats, work: Work) -> Timeline:
        """See `Synchroniser.run`."""
        steps, world = work.work_s.shape
        wait_s, communication_s = np.zeros((steps, world)), np.zeros((steps, world))
        rounds: list[Round] = []
        worked = np.zeros((self._parts, world)) if self._worked is None else self._worked
        now = starts
        for k, (work_s, samples) in enumerate(_between_means(work)):
            now = now + work_s
            worked = worked + samples
            step = work.first_step + (k if work.planned is None else work.planned - 1)
            k = k if work.planned is None else steps - 1
            part = part_due(step, self._every, self._parts)
            means = 0.0 if part is None else 1 / self._parts  # a part has a part of the bytes
            due = [] if part is None else [part]
            if k == steps - 1 and work.epoch_end:
                means += 2  # of replicas, and of their optimisers' states
                due = list(range(self._parts))
            if not means:
                continue
            wait_s[k] = now.max() - now
            communication_s[k] = means * work.costs.round_s
            now = now + wait_s[k] + communication_s[k]
            # Rank 0 reports the round with its own wait and reduction.
            took_s = float(wait_s[k, 0] + communication_s[k, 0])
            givers = int((worked[due] > 0).sum(axis=1).max())
            size, ended_at = work.costs.bytes * len(due) // self._parts, float(now[0])
            rounds.append(Round(self._means, k, givers, [givers], 0, 0.0, took_s, size, ended_at))
            self._means += 1
            worked[due] = 0
        self._worked = worked
        return Timeline(work.work_s, wait_s, communication_s, rounds)

    def meet(self, starts: Floats, costs: Costs) -> float:
        """See `Synchroniser.meet`: two means, as at an epoch's end."""
        return float(starts.max()) + 2 * costs.round_s


def _between_means(work: Work) -> list[tuple[Floats, Ints]]:
    """What ranks do before each step of the plan that may end with a mean: seconds, samples; [W].

    Where ranks make different numbers of steps, it is all that they do.
    """
    if work.planned is None:
        return list(zip(work.work_s, work.samples, strict=True))
    made = work.made
    return [
        (np.where(made, work.work_s, 0).sum(axis=0), np.where(made, work.samples, 0).sum(axis=0))
    ]
