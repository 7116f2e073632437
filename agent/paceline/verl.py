"""verl with Paceline: its balancing call, divided by `paceline.partition`.

verl's trainers call ``get_seqlen_balanced_partitions`` in two places. The controller divides a
batch among the data-parallel ranks, each with equally many sequences (``equal_size=True``); there
the ranks' speeds count. Each worker divides its own sequences into micro-batches
(``equal_size=False``), which one device computes, so no speeds count.

`install` replaces the call in verl's modules. In each of its processes, verl imports the modules
that VERL_USE_EXTERNAL_MODULES names, so a module of your own is the place for it::

    # balanced.py; start verl with VERL_USE_EXTERNAL_MODULES=balanced
    import paceline.verl

    paceline.verl.install(speeds=[1, 1, 1, 0.5])

verl does not report the time that each rank computes: its ``delta_time`` includes the wait for the
other ranks. So the speeds are yours to measure. This module imports neither torch nor, before
`install`, verl.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.balancing import Speeds, partition
from paceline.core.errors import PacelineError

_NAME = "get_seqlen_balanced_partitions"


def get_seqlen_balanced_partitions(
    seqlen_list: Any,
    k_partitions: int,
    equal_size: bool,
    *,
    speeds: Sequence[float] | Speeds | None = None,
) -> list[list[int]]:
    """Divide sequences so that the slowest partition ends as early as possible.

    A drop-in for ``verl.utils.seqlen_balancing.get_seqlen_balanced_partitions``. Equal arguments
    give equal results, so workers that hold the same sequences agree.

    Args:
        seqlen_list: costs of the n sequences, [n], as a list or a tensor: their lengths, or
            verl's ``calculate_workload`` of them.
        k_partitions: number of partitions, k, at most n.
        equal_size: each partition gets n / k sequences, and k must divide n.
        speeds: relative speed of what computes each partition, above 0, [k], or `Speeds`; None:
            all are equal.

    Returns:
        The indices of each partition's sequences, ascending, [k]; no partition is empty.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """
    costs = np.asarray(seqlen_list, np.float64)
    if k_partitions > len(costs):
        raise ValueError(
            f"k_partitions={k_partitions}: there are {len(costs)} sequences; give at most as many "
            "partitions"
        )
    if equal_size and len(costs) % k_partitions:
        raise ValueError(
            f"equal_size: k_partitions={k_partitions} does not divide {len(costs)} sequences"
        )
    parts = partition(costs, k_partitions, speeds=speeds, equal_count=equal_size)
    divided = [part.tolist() for part in parts]
    # A partition without sequences may be as good, but verl computes a micro-batch of each.
    for part in (each for each in divided if not each):
        largest = max(divided, key=len)
        least = min(largest, key=lambda item: costs[item])
        largest.remove(least)
        part.append(least)
    return divided


def install(speeds: Sequence[float] | Speeds | None = None) -> None:
    """Replace verl's balancing call in this process.

    Modules of verl that have imported the call already get the replacement, too. Where no speeds
    count, the replacement also computes verl's own result, and returns the one with the smaller
    largest sum. So it is never worse than verl's. A second call of `install` raises an error.

    Args:
        speeds: as in `get_seqlen_balanced_partitions`; one for each data-parallel rank of the
            actor. Times that are added to a `Speeds` later count from the next batch on.

    Raises:
        ModuleNotFoundError: verl is not installed.
        PacelineError: verl's call has been replaced already.
    """
    theirs = getattr(importlib.import_module("verl.utils.seqlen_balancing"), _NAME)
    if theirs.__module__ == __name__:
        raise PacelineError("paceline.verl.install was called before in this process: call it once")

    def replacement(seqlen_list: Any, k_partitions: int, equal_size: bool) -> list[list[int]]:
        ours = get_seqlen_balanced_partitions(
            seqlen_list, k_partitions, equal_size, speeds=speeds if equal_size else None
        )
        if speeds is not None and equal_size:
            return ours
        costs = np.asarray(seqlen_list, np.float64)
        own: list[list[int]] = theirs(costs.tolist(), k_partitions, equal_size)
        return min(ours, own, key=lambda parts: max(costs[part].sum() for part in parts))

    for name, module in [*sys.modules.items()]:
        if name.split(".")[0] == "verl" and vars(module).get(_NAME) is theirs:
            setattr(module, _NAME, replacement)
