"""Which nodes are too slow to be taken for a run on several without being named."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline_backend.backends.base import NewRunError
from paceline_backend.store.new_runs import NewRun

Node = Mapping[str, Any]  # a row of `store.nodes.listed`

# What counts, what the node does with it, and its unit. The disk does not: caches hide how slow it
# is, and loaders read ahead.
_MEASURED = (
    ("compute_gflops", "computes", "GFLOP/s a core"),
    ("memory_gbps", "copies memory", "GB/s"),
)


def check_factor(new: NewRun) -> None:
    """Refuses a factor that would leave out nodes of the median's speed.

    Raises:
        NewRunError: `join_check` is between 0 and 1.
    """
    if 0 < new.join_check < 1:
        raise NewRunError("join_check", "give 1 or more, or 0 to take any node")


def fast_enough(
    candidates: Sequence[Node], peers: Sequence[Node], factor: float, known: Sequence[str] = ()
) -> tuple[list[Node], list[str]]:
    """The nodes that are not much slower than others, and why the rest is left out.

    A node that was not measured is not left out.

    Args:
        candidates: to choose from.
        peers: to compare with.
        factor: so many times slower than the median of the peers a node may be; 0: any.
        known: names of nodes that are not left out.
    """
    taken, reasons = [], []
    for node in candidates:
        reason = None if node["id"] in known else slower(node, peers, factor)
        if reason is None:
            taken.append(node)
        else:
            reasons.append(reason)
    return taken, reasons


def slower(node: Node, peers: Sequence[Node], factor: float) -> str | None:
    """How much slower a node is than others, if that is too much; None: it is not.

    Of what is too slow, the worst is named.
    """
    worst, words = 0.0, None
    for name, does, unit in _MEASURED:
        speeds = [peer["check"][name] for peer in peers if peer["check"]]
        if not factor or not node["check"] or not speeds:
            continue
        own, median = node["check"][name], statistics.median(speeds)
        ratio = median / own if own > 0 else math.inf
        if ratio > max(factor, worst):
            times = f"{ratio:.1f} times" if own > 0 else "infinitely"
            worst, words = (
                ratio,
                (
                    f"{node['id']} {does} {times} slower than the median of {len(speeds)} nodes "
                    f"({own:.3g} of {median:.3g} {unit})"
                ),
            )
    return words
