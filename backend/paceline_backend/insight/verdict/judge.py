"""Computation of a verdict from the observed steps of a run, and of the slow node that it implies.

`judge` collects candidate causes from `slowness` and `waits`, keeps the causes that cost enough,
and computes the cost of each cause and of all causes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from paceline.policies.base import Floats
from paceline_backend.insight.verdict.findings import Account, TimeLoss
from paceline_backend.insight.verdict.observed import ObservedSteps, Times
from paceline_backend.insight.verdict.slowness import data_of, findings_of, model_of
from paceline_backend.insight.verdict.thresholds import THRESHOLDS
from paceline_backend.insight.verdict.waits import between_of, input_of, network_of, planning_of

_FRACTIONS = {
    "three quarters": 3 / 4,
    "two thirds": 2 / 3,
    "half": 1 / 2,
    "a third": 1 / 3,
    "a quarter": 1 / 4,
    "a fifth": 1 / 5,
    "a tenth": 1 / 10,
}
_PASSING = ("transient", "periodic", "input")
# Maximum difference between a share and the fraction in `_FRACTIONS` that the text gives instead.
_NEAR = 0.06  # relative


@dataclass(frozen=True)
class Verdict:
    """Causes that slow a run down, with their cost.

    Args:
        steps: number of steps that the verdict uses. At least two ranks took part in each of them.
        wall_s: wall time of these steps.
        waste: fraction of `wall_s` that a rank spends waiting for slower ranks, as the mean over
            the ranks.
        noise: relative standard deviation of a rank's computing time from its level; the median
            over the ranks.
        cost_s: time that all causes cost together.
        causes: active causes first; their steps are indices into `seen.step`.
        seen: the observed steps.
        part: cost of each batch ÷ cost of the mean batch of its step, [K, W]; None: too few steps.
    """

    steps: int
    wall_s: float
    waste: float
    noise: float
    cost_s: float
    causes: list[TimeLoss]
    seen: ObservedSteps
    part: Floats | None = None

    def waste_since(self, at: int) -> float:
        """Return the fraction of their time that ranks spent waiting since step index `at`."""
        times = Times.of(self.seen, self.seen.took_part)
        wall_s = float(times.steps_s[at:].sum())
        return float(times.waits_s(self.seen.took_part)[at:].sum()) / wall_s if wall_s else 0.0


def judge(seen: ObservedSteps) -> Verdict:
    """Find the causes of lost time and compute what each of them costs."""
    seen = seen.of(seen.took_part.sum(axis=1) >= 2)
    took_part = seen.took_part
    count = len(seen.step)
    if count < THRESHOLDS.fewest_steps:
        return Verdict(count, 0.0, 0.0, 0.0, 0.0, [], seen)
    times = Times.of(seen, took_part)
    unit_s = float(np.median(times.steps_s))
    planning = planning_of(seen, times, took_part, unit_s) if seen.planned else []
    model = model_of(seen, took_part)
    slow = findings_of(model)
    findings = [
        *planning,
        *input_of(Account(times, planning).without(range(len(planning))), took_part, unit_s),
        *network_of(times, unit_s),
        *between_of(times, unit_s),
        *slow,
        *data_of(model, slow, seen.apart),
    ]
    part = np.where(took_part, model.part, 0.0)
    causes = Account(times, findings, part).counting(THRESHOLDS.least_share)
    without_s = Account(times, causes, part).without(range(len(causes))).wall_s
    return Verdict(
        count,
        times.wall_s,
        float(times.waits_s(took_part).sum()) / times.wall_s,
        float(np.median(model.noise)),
        max(times.wall_s - without_s, 0.0),
        causes,
        seen,
        part,
    )


@dataclass(frozen=True)
class SlowNode:
    """Node that runs all slow ranks of a run."""

    node: str
    # Kind of the cause: node, transient, periodic or input.
    cause: str
    ranks: list[int]
    # The number of all ranks on the node.
    count: int
    # Time of the slow ranks ÷ the typical rank's time, at equal load; None: unknown.
    factor: float | None

    @property
    def words(self) -> str:
        """Return a sentence about the node."""
        if self.cause == "node" and self.factor is not None and len(self.ranks) == self.count:
            return f"{self.node} computes at {_pace(1 / self.factor)} of the others' pace."
        if len(self.ranks) == self.count == 1:
            return f"The slow rank is the only rank of {self.node}."
        number = "all" if len(self.ranks) == self.count else str(len(self.ranks))
        return f"All slow ranks are on {self.node}: {number} of its {self.count}."


def slow_node(verdict: Verdict) -> SlowNode | None:
    """Return the node that runs all slow ranks, if there is exactly one, else None.

    The result is also None if placement is unknown, the run has one node only, or there are fewer
    than `node_steps` steps. The caller must make sure that no rank moved to another node during the
    verdict's steps.
    """
    placement = verdict.seen.nodes
    if verdict.steps < THRESHOLDS.node_steps or len(set(placement)) < 2:
        return None
    named = [cause for cause in verdict.causes if cause.kind == "node"]
    # If no rank is lastingly slow, use the first (costliest) cause, provided that it is temporary
    # slowness or slow data loading, and still active.
    first = [cause for cause in verdict.causes[:1] if cause.until is None]
    named = named or [cause for cause in first if cause.kind in _PASSING]
    slow = sorted({rank for cause in named for rank in cause.ranks})
    names = {placement[rank] for rank in slow}
    if len(names) != 1:
        return None
    [node] = names
    factors = [cause.factor for cause in named if cause.factor is not None]
    count = sum(name == node for name in placement)
    return SlowNode(node, named[0].kind, slow, count, median(factors) if factors else None)


def throttled(gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a sentence about each throttled GPU, from the states in a node's last heartbeat."""
    sentences = []
    for index, gpu in enumerate(gpus):
        if reasons := gpu["throttled_by"]:
            clock, most = gpu["sm_mhz"], gpu["most_sm_mhz"]
            known = clock is not None and most is not None
            clocks = f": {clock:,} of {most:,} MHz" if known else ""
            sentences.append(f"Its GPU {index} is throttled by {' and '.join(reasons)}{clocks}.")
    return sentences


def _pace(share: float) -> str:
    name, nearest = min(_FRACTIONS.items(), key=lambda item: abs(item[1] / share - 1))
    return name if abs(nearest / share - 1) <= _NEAR else f"{100 * share:.0f} %"
