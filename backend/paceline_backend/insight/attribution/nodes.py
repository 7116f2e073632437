"""The node behind a verdict: where all slow ranks sit on one node, it is the node that is slow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from paceline_backend.insight.attribution.verdict import Attribution

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
_NEAR = 0.06  # so far off a fraction may be


@dataclass(frozen=True)
class SlowNode:
    """A node on which all slow ranks of a run sit."""

    node: str
    cause: str  # node, transient or input
    ranks: list[int]  # those that are slow
    count: int  # ranks on the node
    factor: float | None  # time of the slow ranks ÷ the other nodes', at equal load; None: unknown

    @property
    def words(self) -> str:
        """The sentence about it."""
        if self.cause == "node" and self.factor is not None and len(self.ranks) == self.count:
            return f"{self.node} computes at {_pace(1 / self.factor)} of the others' pace."
        if len(self.ranks) == self.count == 1:
            return f"The slow rank is that of {self.node}."
        number = "all" if len(self.ranks) == self.count else str(len(self.ranks))
        return f"All slow ranks are on {self.node}: {number} of its {self.count}."


def slow_node(attribution: Attribution, placement: Sequence[str] | None) -> SlowNode | None:
    """The node of all slow ranks; None: there are none, or they sit on several, or nobody knows.

    Fewer than `FEWEST_STEPS` steps name no node.

    Args:
        attribution: of steps in which the ranks had this placement.
        placement: each rank's node; None: unknown.
    """
    workers = attribution.workers
    if len(attribution.step) < FEWEST_STEPS:
        return None
    if placement is None or len(placement) != len(workers) or len(set(placement)) < 2:
        return None
    cause = "node"
    # Also those whose slowness balancing hides: the run has some other cause then, or none.
    slow = [worker.rank for worker in workers if worker.cause == "node"]
    if not slow and attribution.cause in ("transient", "input"):
        cause, slow = attribution.cause, sorted(attribution.ranks)
    names = {placement[rank] for rank in slow}
    if len(names) != 1:
        return None
    [node] = names
    own = [factor for rank in slow if (factor := workers[rank].factor)]
    others = [w.factor for w in workers if placement[w.rank] != node and w.factor]
    factor = median(own) / median(others) if own and others else None
    count = sum(name == node for name in placement)
    return SlowNode(node, cause, slow, count, factor)


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
