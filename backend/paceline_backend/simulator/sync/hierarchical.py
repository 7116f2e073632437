"""Models RNA's groups on the virtual clock; see `paceline.train.sync.hierarchical`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from paceline_backend.policies.base import Floats
from paceline_backend.simulator.sync.base import Costs, SimulatedTimeline, Work
from paceline_backend.simulator.sync.rounds import SimulatedPartial

# Reductions at the end: of the server's parameters, and of the optimisers' states.
_REDUCTIONS = 2


class SimulatedHierarchical:
    """Groups that have rounds of their own. At the segment's end all ranks synchronise.

    Earlier pushes to the server make no rank wait, so they take no time here. Each group has a
    model; rank 0's group is the first.
    """

    goes_on = False

    def __init__(self, groups: Iterable[tuple[list[int], SimulatedPartial]]) -> None:
        self._groups = list(groups)

    def run(self, starts: Floats, work: Work) -> SimulatedTimeline:
        """See `Synchroniser.run`."""
        wait_s, rounds = np.zeros_like(work.work_s), []
        if not len(wait_s):
            return SimulatedTimeline(work.work_s, wait_s, wait_s, [])
        for group, partial in self._groups:
            timeline = partial.run(starts[group], _of_group(work, group))
            wait_s[:, group] = timeline.wait_s
            rounds += [replace(each, rank=group[0], world=len(group)) for each in timeline.rounds]
        ended_at = starts + (np.where(work.made, work.work_s, 0.0) + wait_s).sum(axis=0)
        wait_s[-1] += self._met_at(ended_at, work.costs) - ended_at
        rounds.sort(key=lambda each: (each.ended_at, each.rank))
        return SimulatedTimeline(work.work_s, wait_s, np.zeros_like(wait_s), rounds)

    def meet(self, starts: Floats, costs: Costs) -> float:
        """See `Synchroniser.meet`."""
        return float(starts.max())

    def _met_at(self, ended_at: Floats, costs: Costs) -> float:
        """Return when all ranks have the server's parameters after the last pushes.

        The server on rank 0 takes one push at a time. The push of its own group takes no time.
        """
        free_at = 0.0
        of_groups = [float(ended_at[group].max()) for group, _ in self._groups]
        for at in sorted(of_groups[1:]):
            free_at = max(at + costs.call_s, free_at) + costs.exchange_s()
        return max(*of_groups, free_at) + _REDUCTIONS * costs.round_s


def _of_group(work: Work, group: list[int]) -> Work:
    return replace(
        work,
        work_s=work.work_s[:, group],
        samples=work.samples[:, group],
        all_reduce_s=work.all_reduce_s[:, group],
        costs=work.costs.among(len(group)),
        dealing=None,
        steps=None if work.steps is None else work.steps[group],
    )
