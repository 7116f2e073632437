"""Speed check of nodes: slow nodes are not chosen for multi-node runs.

A slow node is used if the user names it, or if the run has already trained on it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from paceline_backend.backends.base import NewRunError
from paceline_backend.store.new_runs import NewRun

# Row of `store.nodes.listed`.
Node = Mapping[str, Any]

# Measured values that are compared between nodes, each with its verb and its unit in messages. The
# disk's speed is not compared, because caches hide it and data loaders read ahead.
_MEASURED = (
    ("compute_gflops", "computes", "GFLOP/s per core"),
    ("memory_gbps", "copies memory", "GB/s"),
)


def check_factor(new: NewRun) -> None:
    """Refuse a `join_check` between 0 and 1, which would leave out nodes of median speed."""
    if 0 < new.join_check < 1:
        raise NewRunError("join_check", "give 1 or more, or 0 to accept any node")


def fast_enough(
    candidates: Sequence[Node], peers: Sequence[Node], factor: float, known: Sequence[str] = ()
) -> tuple[list[Node], list[str]]:
    """Return the candidates that are fast enough, and the reasons for leaving out the others.

    A node that was not measured counts as fast enough.

    Args:
        candidates: nodes to choose from.
        peers: nodes whose median speed is the reference.
        factor: maximum ratio of the median speed to a node's speed; 0: any node is accepted.
        known: names of nodes that are accepted without a check.
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
    """Return a description of a node's slowest measured value; None if the node is fast enough.

    For `peers` and `factor` see `fast_enough`.
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
                    f"({own:.3g} {unit}, median {median:.3g})"
                ),
            )
    return words
