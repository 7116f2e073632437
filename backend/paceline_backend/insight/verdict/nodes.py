"""Slow node of a verdict: if all slow ranks run on one node, the node itself is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline_backend.insight.verdict.judge import Verdict

_FRACTIONS = {
    "three quarters": 3 / 4,
    "two thirds": 2 / 3,
    "half": 1 / 2,
    "a third": 1 / 3,
    "a quarter": 1 / 4,
    "a fifth": 1 / 5,
    "a tenth": 1 / 10,
}
# A verdict about a node needs this many steps, because the first steps of ranks are uneven.
FEWEST_STEPS = 20
_PASSING = ("transient", "periodic", "input")
# A fraction is named in words if the share is this close to it.
_NEAR = 0.06  # relative


@dataclass(frozen=True)
class SlowNode:
    """Node that runs all slow ranks of a run."""

    node: str
    # One of node, transient, periodic and input.
    cause: str
    # The slow ranks.
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
            return f"The slow rank is that of {self.node}."
        number = "all" if len(self.ranks) == self.count else str(len(self.ranks))
        return f"All slow ranks are on {self.node}: {number} of its {self.count}."


def slow_node(verdict: Verdict) -> SlowNode | None:
    """Return the node that runs all slow ranks, if there is exactly one, else None.

    The result is also None if placement is unknown, the run has one node only, or there are fewer
    than `FEWEST_STEPS` steps. The ranks must have had their present placement in all steps of the
    verdict.
    """
    placement = verdict.seen.nodes
    if verdict.steps < FEWEST_STEPS or len(set(placement)) < 2:
        return None
    named = [cause for cause in verdict.causes if cause.kind == "node"]
    # Without a lasting slowness, use the costliest cause if it is temporary and still active.
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
