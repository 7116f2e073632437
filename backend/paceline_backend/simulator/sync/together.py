"""Models of synchronisations in which all ranks wait for each other: all-reduce and averaging."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paceline.core.replicas import part_due
from paceline.policies.base import Floats, Ints
from paceline_backend.simulator.sync.base import Costs, SimulatedRound, SimulatedTimeline, Work


class SimulatedAllReduce:
    """DDP's all-reduce: a step ends on all ranks when the slowest rank has reduced."""

    goes_on = False

    def run(self, starts: Floats, work: Work) -> SimulatedTimeline:
        """See `SimulatedSync.run`."""
        wait_s = work.work_s.max(axis=1, keepdims=True) - work.work_s
        return SimulatedTimeline(work.work_s, wait_s, work.all_reduce_s, [])

    def synchronise(self, starts: Floats, costs: Costs) -> float:
        """See `SimulatedSync.synchronise`."""
        return float(starts.max())


class SimulatedAveraging:
    """Ranks that train without an all-reduce, and average all ranks' replicas every few steps.

    Args:
        every: number of steps between two averages (H of local SGD), counted over the run; None:
            replicas are averaged only at an epoch's end.
        parts: number of parts of the parameters, which are averaged one after the other.
        overlap: number of steps that ranks run while a mean is being exchanged. If ranks share
            batches, the mean is applied at the end of the span that includes the last of these
            steps.
        keep: fraction of its own parameters that a rank keeps when a mean is applied that was
            exchanged during `overlap` steps.
    """

    goes_on = True

    def __init__(
        self, every: int | None, parts: int = 1, overlap: int = 0, keep: float = 0
    ) -> None:
        self._every, self._parts, self._overlap, self._keep = every, parts, overlap, keep
        # The mean that is being exchanged while ranks run further steps; None: no mean.
        self._flight: _SimulatedMean | None = None
        # Number of samples that each rank has trained since the previous mean of each part of the
        # parameters, [parts, W].
        self._worked: Floats | None = None
        self._means = 0

    def run(self, starts: Floats, work: Work) -> SimulatedTimeline:
        """See `SimulatedSync.run`."""
        steps, world = work.work_s.shape
        wait_s, communication_s = np.zeros((steps, world)), np.zeros((steps, world))
        timeline = SimulatedTimeline(work.work_s, wait_s, communication_s, [])
        worked = np.zeros((self._parts, world)) if self._worked is None else self._worked
        now = starts
        for k, (work_s, samples) in enumerate(_between_means(work)):
            now = now + work_s
            worked = worked + samples
            step = work.first_step + (k if work.planned is None else work.planned - 1)
            k = k if work.planned is None else steps - 1
            ends = k == steps - 1 and work.epoch_end
            if self._flight is not None and step >= self._flight.due:
                now = self._land(now, k, work.costs, worked, timeline)
            part = part_due(step, self._every, self._parts)
            if self._overlap and part is not None:
                # The exchange begins when all ranks know that every rank has contributed.
                begins_at = float(now.max()) + work.costs.call_s
                ends_at = begins_at + work.costs.round_s / self._parts
                gave = worked[part].copy()
                self._flight = _SimulatedMean(part, step + self._overlap, begins_at, ends_at, gave)
                worked[part], part = 0, None
            if self._flight is not None and ends:
                now = self._land(now, k, work.costs, worked, timeline)
            means = 0.0 if part is None else 1 / self._parts
            due = [] if part is None else [part]
            if ends:
                # The last exchange averages replicas and their optimisers' states.
                means += 2
                due = list(range(self._parts))
            if not means:
                continue
            waits_s, round_s = now.max() - now, means * work.costs.round_s
            wait_s[k] += waits_s
            communication_s[k] += round_s
            now = now + waits_s + round_s
            # Rank 0 reports the exchange, with its own wait.
            took_s = float(waits_s[0] + round_s)
            givers = int((worked[due] > 0).sum(axis=1).max())
            size, ended_at = work.costs.bytes * len(due) // self._parts, float(now[0])
            timeline.rounds.append(
                SimulatedRound(self._means, k, givers, [givers], 0, 0.0, took_s, size, ended_at)
            )
            self._means += 1
            worked[due] = 0
        self._worked = worked
        return timeline

    def synchronise(self, starts: Floats, costs: Costs) -> float:
        """See `SimulatedSync.synchronise`. Ranks average their replicas and optimisers' states."""
        begins_at, flight, self._flight = float(starts.max()), self._flight, None
        if flight is not None:
            begins_at = max(begins_at, flight.ends_at)
        return begins_at + 2 * costs.round_s

    def _land(
        self,
        now: Floats,
        k: int,
        costs: Costs,
        worked: Floats,
        timeline: SimulatedTimeline,
    ) -> Floats:
        """Let all ranks wait after step `k` for the end of the exchange that is in progress.

        Return the time at which each rank continues, [W]; `now` is the time before the wait, [W].
        The wait, the rest of the exchange's time and its record are added to `timeline`.
        """
        flight, self._flight = self._flight, None
        assert flight is not None
        waits_s = np.maximum(flight.begins_at - now, 0)
        left_s = np.maximum(flight.ends_at - (now + waits_s), 0)
        timeline.wait_s[k] += waits_s
        timeline.communication_s[k] += left_s
        now = now + waits_s + left_s
        took_s, givers = float(waits_s[0] + left_s[0]), int((flight.gave > 0).sum())
        worked[flight.part] += self._keep * flight.gave
        size, ended_at = costs.bytes // self._parts, float(now[0])
        timeline.rounds.append(
            SimulatedRound(self._means, k, givers, [givers], 0, 0.0, took_s, size, ended_at)
        )
        self._means += 1
        return now


@dataclass(frozen=True)
class _SimulatedMean:
    part: int
    # Step after which the mean is applied.
    due: int
    begins_at: float
    ends_at: float
    # Number of samples that each rank had trained since the part's previous mean.
    gave: Floats  # [W]


def _between_means(work: Work) -> list[tuple[Floats, Ints]]:
    """Return the ranks' work between the moments at which replicas may be averaged.

    Each entry is a pair of arrays, [W]: the seconds and the number of samples of each rank. Usually
    there is an entry for each step. If ranks run different numbers of steps, replicas can be
    averaged only after the last step, so there is a single entry with the sums.
    """
    if work.planned is None:
        return list(zip(work.work_s, work.samples, strict=True))
    made = work.made
    return [
        (np.where(made, work.work_s, 0).sum(axis=0), np.where(made, work.samples, 0).sum(axis=0))
    ]
