"""What a verdict rests on: the times of each rank's steps, and the wall time that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.wire import OBSERVED
from paceline_backend.policies.base import Floats, Ints, usable

Bools = npt.NDArray[np.bool_]

FEWEST = 16  # of fewer steps under a policy, nothing is said by themselves
_OF_RANKS = ("samples", "load", "squares", "longest", "data_s", "compute_s", "sync_s")
_OF_STEPS = ("step", *_OF_RANKS, "between_s", "first", "apart")


def mean_of(values: Floats, known: Bools, axis: int) -> Floats:
    """Mean of the known values along an axis; 0 where there are none."""
    many = known.sum(axis=axis)
    return np.asarray(np.where(known, values, 0.0).sum(axis=axis) / np.maximum(many, 1))


@dataclass(frozen=True)
class ObservedSteps:
    """What W ranks reported of K steps, ascending; arrays are [K, W] unless stated.

    A rank without samples in a step (0 in `samples`), or without a record of it (NaN), takes no
    part in the step.
    """

    step: Ints  # [K]
    samples: Floats  # n
    load: Floats  # Λ, user's size unit
    squares: Floats  # Σλ²
    longest: Floats  # max λ
    data_s: Floats
    compute_s: Floats  # T
    sync_s: Floats  # waiting for slower ranks, and the reduction
    between_s: Floats  # [K] after the step: no rank loads, computes or reduces
    first: Bools  # [K] whether the step is the first of its segment
    apart: Bools  # [K] whether ranks did not wait for each other: a relaxed synchroniser
    nodes: Sequence[str] = ()  # [W] each rank's node; empty: unknown
    switched: Sequence[int] = ()  # steps with which another policy began, ascending
    # In force in the last step; `wire.OBSERVED`: the script divides its batches; empty: unknown.
    policy: str = ""
    # The policy divides each global batch by sizes and by speeds, as `paceline` does.
    balances: bool = False
    # Ranks get equal parts, whatever the policy plans: the script's loss allows no others.
    equal: bool = False

    def __post_init__(self) -> None:
        shape = self.compute_s.shape
        for name in _OF_RANKS:
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: {getattr(self, name).shape}; compute_s has {shape}")
        if len(self.nodes) not in (0, shape[-1]):
            raise ValueError(f"nodes: {len(self.nodes)}; give one of each of {shape[-1]} ranks")
        for name in ("step", "between_s", "first", "apart"):
            if len(shape) != 2 or getattr(self, name).shape != shape[:1]:
                raise ValueError(f"{name}: {getattr(self, name).shape}; give [K] for {shape}")

    @property
    def took_part(self) -> Bools:
        """Which ranks had a batch and reported its time, [K, W]."""
        finite = np.isfinite(self.compute_s) & np.isfinite(self.load)
        return np.asarray(usable(self.samples, self.load, self.compute_s), bool) & finite

    @property
    def policies(self) -> list[slice]:
        """The steps that each policy planned; a few steps are taken for those of the one before."""
        count, begins = len(self.step), [0]
        for at in np.searchsorted(self.step, self.switched).tolist():
            if count - at < FEWEST:
                break
            if at - begins[-1] >= FEWEST:
                begins.append(at)
            elif len(begins) > 1:
                begins[-1] = at
        return [slice(*ends) for ends in pairwise([*begins, count])]

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks are known to be on one node."""
        return len(set(self.nodes)) == 1

    @property
    def planned(self) -> bool:
        """Whether a plan divides the batches: in an observed run the script does."""
        return self.policy != OBSERVED

    @property
    def settles(self) -> bool:
        """Whether the policy in force has planned few steps yet."""
        inside = [first for first in self.switched if first <= self.step[-1]]
        return bool(inside) and int((self.step >= inside[-1]).sum()) < FEWEST

    def of(self, steps: Bools) -> ObservedSteps:
        """The rows of the steps that are True in `steps`, [K]."""
        chosen: dict[str, Any] = {name: getattr(self, name)[steps] for name in _OF_STEPS}
        return replace(self, **chosen)


@dataclass(frozen=True)
class Times:
    """The times that make the wall time of K steps.

    Where all ranks wait for each other, a step takes as long as its slowest rank. Where they do not
    (`apart`), fast ranks make more steps than slow ones: a step takes the mean of the ranks' times.
    """

    compute_s: Floats  # [K, W]; 0 for ranks that take no part
    data_s: Floats  # [K, W]; 0 for ranks that take no part
    reduce_s: Floats  # [K]
    between_s: Floats  # [K]
    apart: Bools  # [K]

    @staticmethod
    def of(seen: ObservedSteps, took_part: Bools) -> Times:
        """The times that ranks reported."""
        waits = np.where(took_part, seen.sync_s, np.inf).min(axis=1)
        mean = np.where(took_part, np.nan_to_num(seen.sync_s), 0.0).sum(axis=1)
        waits = np.where(seen.apart, mean / took_part.shape[1], waits)
        # Where a rank's record is lost, the others may have waited for it. A rank that has no
        # record before or after is not there: there were fewer ranks.
        known = ~np.isnan(seen.compute_s)
        there = np.maximum.accumulate(known, axis=0)
        there &= np.maximum.accumulate(known[::-1], axis=0)[::-1]
        lost = (there & ~known).any(axis=1) | ~np.isfinite(waits)
        waits[lost] = np.median(waits[~lost]) if not lost.all() else 0.0
        return Times(
            np.where(took_part, seen.compute_s, 0.0),
            np.where(took_part & np.isfinite(seen.data_s), seen.data_s, 0.0),
            np.maximum(waits, 0.0),
            np.maximum(np.nan_to_num(seen.between_s), 0.0),
            seen.apart,
        )

    @property
    def steps_s(self) -> Floats:
        """Wall time of each step, [K]."""
        ready = self.compute_s + self.data_s
        ready_s = np.where(self.apart, ready.mean(axis=1), ready.max(axis=1))
        return np.asarray(ready_s + self.reduce_s + self.between_s)

    def waits_s(self, took_part: Bools) -> Floats:
        """What a rank waits for the slowest in each step, mean over the ranks, [K]."""
        ready = self.compute_s + self.data_s
        waits = ready.max(axis=1) - mean_of(ready, took_part, axis=1)
        return np.asarray(np.where(self.apart, 0.0, waits))

    @property
    def wall_s(self) -> float:
        """Wall time of all steps."""
        return float(self.steps_s.sum())
