"""The node behind a verdict: where all slow ranks sit on one node, it is the node that is slow."""

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
FEWEST_STEPS = 20  # that a verdict about a node rests on; the first steps of ranks are uneven
_PASSING = ("transient", "periodic", "input")
_NEAR = 0.06  # so far off a fraction may be


@dataclass(frozen=True)
class SlowNode:
    """A node on which all slow ranks of a run sit."""

    node: str
    cause: str  # node, transient, periodic or input
    ranks: list[int]  # those that are slow
    count: int  # ranks on the node
    factor: float | None  # time of the slow ranks ÷ the typical rank's, at equal load; None: none

    @property
    def words(self) -> str:
        """The sentence about it."""
        if self.cause == "node" and self.factor is not None and len(self.ranks) == self.count:
            return f"{self.node} computes at {_pace(1 / self.factor)} of the others' pace."
        if len(self.ranks) == self.count == 1:
            return f"The slow rank is that of {self.node}."
        number = "all" if len(self.ranks) == self.count else str(len(self.ranks))
        return f"All slow ranks are on {self.node}: {number} of its {self.count}."


def slow_node(verdict: Verdict) -> SlowNode | None:
    """The node of all slow ranks; None: there are none, or they sit on several, or nobody knows.

    Fewer than `FEWEST_STEPS` steps name no node.

    Args:
        verdict: of steps in which the ranks had their present placement.
    """
    placement = verdict.seen.nodes
    if verdict.steps < FEWEST_STEPS or len(set(placement)) < 2:
        return None
    named = [cause for cause in verdict.causes if cause.kind == "node"]
    # Without a lasting slowness, the costliest cause if it may pass and has not yet.
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
    """A sentence about each GPU of a slow node whose clock something lowers.

    Args:
        gpus: states, as the node's last heartbeat had them.
    """
    sentences = []
    for index, gpu in enumerate(gpus):
        if reasons := gpu["throttled_by"]:
            clock, most = gpu["sm_mhz"], gpu["most_sm_mhz"]
            known = clock is not None and most is not None
            clocks = f": {clock:,} of {most:,} MHz" if known else ""
            sentences.append(f"Its GPU {index} is throttled by {' and '.join(reasons)}{clocks}.")
    return sentences


def _pace(share: float) -> str:
    """A share in words, or in percent."""
    name, nearest = min(_FRACTIONS.items(), key=lambda item: abs(item[1] / share - 1))
    return name if abs(nearest / share - 1) <= _NEAR else f"{100 * share:.0f} %"
