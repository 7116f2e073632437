"""What may have cost time: findings, and the time that a run would have taken without them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline_backend.insight.verdict.observed import Times
from paceline_backend.policies.base import Floats, Ints

_FAR = 0.2  # of the least cost: so small findings are left out all at once
_PARTS = ("compute_s", "data_s", "reduce_s", "between_s")


@dataclass(frozen=True)
class TimeChange:
    """What a finding changes in the times of some ranks, or of all.

    Args:
        ranks: whose times, [R].
        slower: factor of their computing, > 0, [K, R]; None: 1.
        dealt: factor of what their batches cost, > 0, [K, R]: without the finding, the same work
            of the step is divided in other parts; None: 1.
        pause_s: what their computing takes longer, whatever their speed, [K, R]; None: 0.
        data_s: what their loading takes longer, [K, R]; None: 0.
        reduce_s: what reductions take longer, [K]; None: 0.
        between_s: what the time between steps is longer, [K]; None: 0.
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
    """Something that may have cost time. Steps are indices into the range.

    Args:
        kind: node, transient, periodic, input, data, network, between or planning.
        ranks: the culprits; empty: no rank is named.
        effect: what it does to the times.
        since: when it began; None: before the range.
        until: its last step; None: it goes on.
        factor: time with it ÷ without it, the median over the culprits; None: of no use.
        factors: the same of the culprit that is slowed down least, and of that which is most.
        period: distance at which it comes back, in steps; None: it does not.
        trend: its factor when it began to grow and now; None: it does not grow.
        times: how often it happened; 1 for what lasts.
        hidden_since: since when the plan makes up for it; None: it does not.
        cost_s: what it costs beside the others; known once they count.
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
        """Whether the plan makes up for it."""
        return self.hidden_since is not None


class Account:
    """What a run would have taken without some of its findings.

    Args:
        times: as they were.
        findings: what may have cost time.
        part: what each batch costs ÷ the mean batch of its step, [K, W]; 0 where a rank takes no
            part. None: no finding deals batches out.
    """

    def __init__(
        self, times: Times, findings: Sequence[TimeLoss], part: Floats | None = None
    ) -> None:
        self.times = times
        self.findings = list(findings)
        self.part = part

    def without(self, removed: Iterable[int]) -> Times:
        """The times without the findings of these numbers.

        A slowness that goes on does not lengthen a pause in the same step.
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
            # The work of a step stays the same, however it is dealt out.
            compute *= self.part.sum(axis=1, keepdims=True) / dealt
            compute /= (self.part / dealt).sum(axis=1, keepdims=True)
        compute = np.maximum(compute, 0.0) + pauses
        parts = (compute, np.maximum(data, 0.0), np.maximum(reduce, 0.0), np.maximum(between, 0.0))
        return replace(times, **dict(zip(_PARTS, parts, strict=True)))

    def alone_s(self) -> Floats:
        """What each finding would cost if it were the only one."""
        everything = set(range(len(self.findings)))
        least_s = self.without(everything).wall_s
        return np.array([self.without(everything - {at}).wall_s for at in everything]) - least_s

    def counting(self, least: float) -> list[TimeLoss]:
        """Those that would cost at least this share of the wall time alone; each with its cost.

        What goes on comes first, then what has passed, each by what it would cost alone. What does
        not count stays in the times.
        """
        least_s = least * self.times.wall_s
        account, alone = self, self.alone_s()
        while len(alone) and alone.min() < least_s:
            # Many small ones at once, then one by one: each that goes stays in the others' times.
            gone = alone < _FAR * least_s
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
