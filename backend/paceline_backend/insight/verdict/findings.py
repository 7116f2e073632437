"""Candidate causes of lost time (findings), and the time that a run would have taken without them.

`slowness` and `waits` create the findings. `Account` computes the cost of each finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.policies.base import Floats, Ints
from paceline_backend.insight.verdict.observed import Times
from paceline_backend.insight.verdict.thresholds import THRESHOLDS

_PARTS = ("compute_s", "data_s", "reduce_s", "between_s")


@dataclass(frozen=True)
class TimeChange:
    """Effect of a finding on the times of some or all ranks.

    Args:
        ranks: affected ranks, [R].
        slower: factor by which the finding lengthens the ranks' computing time, > 0, [K, R]; None:
            1.
        dealt: factor by which the finding changes the cost of the ranks' batches, because the work
            of a step is divided differently, > 0, [K, R]; None: 1.
        pause_s: additional computing time, independent of the rank's speed, [K, R]; None: 0.
        data_s: additional data loading time, [K, R]; None: 0.
        reduce_s: additional time of reductions, [K]; None: 0.
        between_s: additional time between steps, [K]; None: 0.
    """

    ranks: Ints
    slower: Floats | None = None
    dealt: Floats | None = None
    pause_s: Floats | None = None
    data_s: Floats | None = None
    reduce_s: Floats | None = None
    between_s: Floats | None = None


@dataclass(frozen=True)
class TimeLoss:
    """Possible cause of lost time. Steps are indices into the steps that the verdict covers.

    Args:
        kind: node, transient, periodic, input, data, network, between or planning.
        ranks: the responsible ranks; empty: no rank is named.
        effect: how the cause changes the times of the ranks' steps.
        since: first step of the cause; None: the cause started before the covered steps.
        until: last step of the cause; None: the cause is still active.
        factor: time with the cause ÷ time without it, the median over `ranks`; None: not
            applicable.
        factors: `factor` of the rank that is slowed down least, and of the rank that is slowed down
            most.
        period: distance between occurrences, in steps; None: not periodic.
        trend: factor at the start of the growth, and now; None: the factor does not grow.
        times: number of occurrences; 1 for a lasting cause.
        hidden_since: first step at which the plan compensates for the cause; None: the plan does
            not compensate for it.
        cost_s: time that would be saved if only this cause were removed, set by
            `Account.counting`.
    """

    kind: str
    ranks: tuple[int, ...]
    effect: TimeChange
    since: int | None = None
    until: int | None = None
    factor: float | None = None
    factors: tuple[float, float] | None = None
    period: int | None = None
    trend: tuple[float, float] | None = None
    times: int = 1
    hidden_since: int | None = None
    cost_s: float = 0.0

    @property
    def hidden(self) -> bool:
        """Return whether the plan compensates for the cause."""
        return self.hidden_since is not None


class Account:
    """Computation of the time that a run would have taken without some of its findings.

    `times` are the measured times. `part` is the cost of each batch ÷ the cost of the mean batch of
    its step, [K, W]; 0 where a rank has no batch. If `part` is None, no finding changes how batches
    are divided.
    """

    def __init__(
        self, times: Times, findings: Sequence[TimeLoss], part: Floats | None = None
    ) -> None:
        self.times = times
        self.findings = list(findings)
        self.part = part

    def without(self, removed: Iterable[int]) -> Times:
        """Return the times without the findings with these indices.

        A pause takes as long on a slow rank as on a fast rank: if a lastingly slow rank also pauses
        in a step, removing the slowness does not shorten the pause.
        """
        times, gone = self.times, set(removed)
        compute, pauses = times.compute_s.copy(), np.zeros_like(times.compute_s)
        data, reduce, between = times.data_s.copy(), times.reduce_s.copy(), times.between_s.copy()
        dealt = np.ones_like(compute)
        for at, finding in enumerate(self.findings):
            effect = finding.effect
            if effect.pause_s is not None:
                compute[:, effect.ranks] -= effect.pause_s
                if at not in gone:
                    pauses[:, effect.ranks] += effect.pause_s
        for at in gone:
            effect = self.findings[at].effect
            if effect.slower is not None:
                compute[:, effect.ranks] /= effect.slower
            if effect.dealt is not None:
                dealt[:, effect.ranks] *= effect.dealt
            if effect.data_s is not None:
                data[:, effect.ranks] -= effect.data_s
            if effect.reduce_s is not None:
                reduce -= effect.reduce_s
            if effect.between_s is not None:
                between -= effect.between_s
        if self.part is not None:
            # The total work of a step does not depend on how it is divided.
            compute *= self.part.sum(axis=1, keepdims=True) / dealt
            compute /= (self.part / dealt).sum(axis=1, keepdims=True)
        compute = np.maximum(compute, 0.0) + pauses
        parts = (compute, np.maximum(data, 0.0), np.maximum(reduce, 0.0), np.maximum(between, 0.0))
        return replace(times, **dict(zip(_PARTS, parts, strict=True)))

    def alone_s(self) -> Floats:
        """Return the time that each finding would cost if it were the only one, in seconds."""
        everything = set(range(len(self.findings)))
        least_s = self.without(everything).wall_s
        return np.array([self.without(everything - {at}).wall_s for at in everything]) - least_s

    def counting(self, least: float) -> list[TimeLoss]:
        """Return the findings that alone would cost at least the share `least` of the wall time.

        `cost_s` of each finding is set. Active findings come first, then past ones; each group is
        ordered by the cost that a finding would have alone, highest first.
        """
        least_s = least * self.times.wall_s
        account, alone = self, self.alone_s()
        while len(alone) and alone.min() < least_s:
            # If one finding is left out, the costs of all other findings change, because the time
            # that it explained now belongs to the run without causes. So first leave out all
            # findings far below the limit, then one by one the finding with the lowest cost.
            gone = alone < THRESHOLDS.far * least_s
            if not gone.any():
                gone = np.arange(len(alone)) == alone.argmin()
            kept = [finding for finding, out in zip(account.findings, gone, strict=True) if not out]
            account = Account(self.times, kept, self.part)
            alone = account.alone_s()
        made = [
            replace(finding, cost_s=max(self.times.wall_s - account.without([at]).wall_s, 0.0))
            for at, finding in enumerate(account.findings)
        ]
        order = sorted(range(len(made)), key=lambda at: (made[at].until is not None, -alone[at]))
        return [made[at] for at in order]
