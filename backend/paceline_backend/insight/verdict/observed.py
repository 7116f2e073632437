"""Input of a verdict: the times of each rank's steps, and the wall time that results from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline import policies
from paceline.policies.base import Floats, Ints, usable
from paceline.wire import OBSERVED
from paceline_backend.insight.verdict.thresholds import THRESHOLDS
from paceline_backend.store import Connection, records, segments, switches
from paceline_backend.store.attempts import Placement
from paceline_backend.store.reads import Range

Bools = npt.NDArray[np.bool_]

_OF_RANKS = ("samples", "load", "squares", "longest", "data_s", "compute_s", "sync_s")
_OF_STEPS = ("step", *_OF_RANKS, "between_s", "first", "apart")
_COLUMNS = ("samples", "load", "squares", "longest", "data_s", "compute_s", "sync_s")
_MORE = ("step_s", "ended_at", "segment", "attempt")


def mean_of(values: Floats, known: Bools, axis: int) -> Floats:
    """Return the mean of the known values along an axis; 0 where no value is known."""
    many = known.sum(axis=axis)
    return np.asarray(np.where(known, values, 0.0).sum(axis=axis) / np.maximum(many, 1))


@dataclass(frozen=True)
class ObservedSteps:
    """Reports of W ranks for K ascending steps; arrays are [K, W] unless stated otherwise.

    A rank without samples in a step (0 in `samples`), or without a record of the step (NaN), does
    not take part in it.
    """

    step: Ints  # [K]
    samples: Floats  # n
    load: Floats  # Λ, in the user's size unit
    squares: Floats  # Σλ²
    longest: Floats  # max λ
    data_s: Floats
    compute_s: Floats  # T
    # Time that ranks spend waiting for slower ranks and reducing gradients.
    sync_s: Floats
    # Time after the step, and before the next step, while no rank loads, computes or reduces.
    between_s: Floats  # [K], seconds
    # True for the first step of a segment.
    first: Bools  # [K]
    # True where ranks did not wait for each other, because of relaxed synchronisation.
    apart: Bools  # [K]
    # Each rank's node; empty: unknown.
    nodes: Sequence[str] = ()  # [W]
    # The first step of each policy that replaced another one, ascending.
    switched: Sequence[int] = ()
    # Policy in force in the last step. `wire.OBSERVED`: the script divides its batches. Empty:
    # unknown.
    policy: str = ""
    # True if the policy divides each global batch by the sizes of samples and the speeds of ranks;
    # see `Criteria.by_cost_and_speed`.
    balances: bool = False
    # True if ranks get equal local batches regardless of the plan, because the script's loss does
    # not allow uneven batches.
    equal: bool = False

    def __post_init__(self) -> None:
        shape = self.compute_s.shape
        for name in _OF_RANKS:
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name}: {getattr(self, name).shape}; compute_s has {shape}")
        if len(self.nodes) not in (0, shape[-1]):
            raise ValueError(f"nodes: {len(self.nodes)}; give one for each of {shape[-1]} ranks")
        for name in ("step", "between_s", "first", "apart"):
            if len(shape) != 2 or getattr(self, name).shape != shape[:1]:
                raise ValueError(
                    f"{name}: {getattr(self, name).shape}; give [K] if compute_s is [K, W]: {shape}"
                )

    @property
    def took_part(self) -> Bools:
        """Return a mask of the ranks that had a batch and reported its time, [K, W]."""
        finite = np.isfinite(self.compute_s) & np.isfinite(self.load)
        return np.asarray(usable(self.samples, self.load, self.compute_s), bool) & finite

    @property
    def policies(self) -> list[slice]:
        """Return the steps of each policy as slices of step indices.

        The steps of a policy that planned fewer than `policy_steps` steps count for the previous
        policy.
        """
        count, begins = len(self.step), [0]
        for at in np.searchsorted(self.step, self.switched).tolist():
            if count - at < THRESHOLDS.policy_steps:
                break
            if at - begins[-1] >= THRESHOLDS.policy_steps:
                begins.append(at)
            elif len(begins) > 1:
                begins[-1] = at
        return [slice(*ends) for ends in pairwise([*begins, count])]

    @property
    def on_one_node(self) -> bool:
        """Return whether all ranks are known to run on one node."""
        return len(set(self.nodes)) == 1

    @property
    def planned(self) -> bool:
        """Return whether a plan divides the batches; in an observed run, the script does."""
        return self.policy != OBSERVED

    @property
    def settles(self) -> bool:
        """Return whether the policy in force has planned too few steps to be judged."""
        inside = [first for first in self.switched if first <= self.step[-1]]
        return bool(inside) and int((self.step >= inside[-1]).sum()) < THRESHOLDS.policy_steps

    def of(self, steps: Bools) -> ObservedSteps:
        """Return the rows of the steps that the mask `steps`, [K], selects."""
        chosen: dict[str, Any] = {name: getattr(self, name)[steps] for name in _OF_STEPS}
        return replace(self, **chosen)


@dataclass(frozen=True)
class Times:
    """Components of the wall time of K steps, in seconds; 0 for ranks without a batch.

    If ranks wait for each other, a step takes as long as its slowest rank. If ranks do not wait
    (`apart`), fast ranks do more steps than slow ranks, so the duration of a step is the mean of
    the ranks' times.
    """

    compute_s: Floats  # [K, W]
    data_s: Floats  # [K, W]
    reduce_s: Floats  # [K]
    between_s: Floats  # [K]
    apart: Bools  # [K]

    @staticmethod
    def of(seen: ObservedSteps, took_part: Bools) -> Times:
        """Return the times that ranks reported."""
        waits = np.where(took_part, seen.sync_s, np.inf).min(axis=1)
        mean = np.where(took_part, np.nan_to_num(seen.sync_s), 0.0).sum(axis=1)
        waits = np.where(seen.apart, mean / took_part.shape[1], waits)
        # The shortest wait of a step is the time of its reduction, because the slowest rank does
        # not wait. If a rank's record of a step is missing, this rank may be the slowest, so the
        # median of the other steps is used instead. If a rank has no earlier or no later record,
        # the run had fewer ranks at that time, and no record is missing.
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
        """Return the wall time of each step, [K]."""
        ready = self.compute_s + self.data_s
        ready_s = np.where(self.apart, ready.mean(axis=1), ready.max(axis=1))
        return np.asarray(ready_s + self.reduce_s + self.between_s)

    def waits_s(self, took_part: Bools) -> Floats:
        """Return the time that ranks wait for the slowest rank, as a mean over the ranks, [K]."""
        ready = self.compute_s + self.data_s
        waits = ready.max(axis=1) - mean_of(ready, took_part, axis=1)
        return np.asarray(np.where(self.apart, 0.0, waits))

    @property
    def wall_s(self) -> float:
        """Return the wall time of all steps."""
        return float(self.steps_s.sum())


def read_observed(
    connection: Connection, run: int, span: Range, placement: Placement | None = None
) -> ObservedSteps:
    """Return the ranks' reports of the complete steps in the range `span`.

    If `span` has no first step, the last `range_steps` steps are read. If there are more steps than
    `most_rows` and `most_pairs` permit, only the newest steps are returned. Steps before
    `placement` took effect are left out, because the ranks ran on other nodes then.
    """
    read = records.newest_complete(
        connection,
        run,
        _COLUMNS + _MORE,
        span,
        count=THRESHOLDS.range_steps,
        most_rows=THRESHOLDS.most_rows,
    )
    if placement is not None:
        read = read.since(placement.since)
    width = max(len(np.unique(read.table[:, 1])), 1)
    newest = np.unique(read.table[:, 0])[-int(np.sqrt(THRESHOLDS.most_pairs / width)) :]
    read = read.since(int(newest.min(initial=0)))
    steps, columns = read.by_step(None if placement is None else len(placement.nodes))
    world = columns.shape[2]
    given = dict(zip(_COLUMNS + _MORE, columns, strict=True))
    step = steps.astype(np.int64)
    apart, attempt = np.zeros(len(step), bool), _first_known(given["attempt"])
    if len(step):
        for number, first, end in segments.apart(connection, run, int(step[0]), int(step[-1])):
            apart |= (attempt == number) & (step >= first) & (step < end)
    segment = _first_known(given["segment"])
    nodes = () if placement is None else tuple(placement.nodes)
    version = _versions(connection, run, attempt, segment)
    last = int(version[version >= 0][-1]) if (version >= 0).any() else 0
    in_force = switches.of_version(connection, run, last)
    newest = attempt[~np.isnan(attempt)][-1:].astype(int).tolist()
    equal = any(segments.equal_because(connection, run, number) for number in newest)
    return ObservedSteps(
        step=step,
        samples=given["samples"],
        load=given["load"],
        squares=given["squares"],
        longest=given["longest"],
        data_s=given["data_s"],
        compute_s=given["compute_s"],
        sync_s=given["sync_s"],
        between_s=_between(step, given),
        first=np.diff(segment, prepend=np.nan) != 0,
        apart=apart,
        nodes=nodes if len(nodes) == world else (),
        switched=_switched(step, version),
        policy="" if in_force is None else in_force.policy,
        balances=in_force is not None and not equal and _balances(in_force),
        equal=equal,
    )


def _balances(policy: switches.Switch) -> bool:
    try:
        return policies.make(policy.policy, policy.parameters).criteria.by_cost_and_speed
    # The policy is `OBSERVED`, the preset or one of its parameters is not installed here, or a
    # third-party preset raises an error of its own.
    except Exception:
        return False


def _versions(connection: Connection, run: int, attempt: Floats, segment: Floats) -> Ints:
    """Return the policy version that planned each step, [K]; -1: unknown."""
    version = np.full(len(segment), -1)
    for number in np.unique(attempt[~np.isnan(attempt)]):
        mine = attempt == number
        span = int(np.nanmin(segment[mine])), int(np.nanmax(segment[mine]))
        for first, planned in segments.versions(connection, run, int(number), span):
            version[mine & (segment >= first)] = planned
    return version


def _switched(step: Ints, version: Ints) -> list[int]:
    known = version >= 0
    return [int(at) for at in step[known][1:][np.diff(version[known]) != 0]]


def _first_known(values: Floats) -> Floats:
    if not values.size:
        return np.empty(len(values))
    at = np.argmax(~np.isnan(values), axis=1)
    return np.asarray(values[np.arange(len(values)), at])


def _between(step: Ints, given: dict[str, Floats]) -> Floats:
    """Return the idle time between each step and the next one, in seconds, [K].

    It is the minimum over the ranks. A rank is idle if it neither loads, computes nor reduces. Its
    next step starts when its batch has arrived. After the last step, and between two attempts, the
    idle time is unknown: the result is the median of the other steps.
    """
    out = np.zeros(len(step))
    if len(step) < 2 or not given["ended_at"].shape[1]:
        return out
    began_at = given["ended_at"] - given["step_s"]
    busy_s = given["compute_s"][:-1] + given["sync_s"][:-1] + given["data_s"][1:]
    idle_s = np.diff(began_at, axis=0) - busy_s
    known = ~np.isnan(idle_s) & (np.diff(given["attempt"], axis=0) == 0)
    known &= (np.diff(step) == 1)[:, None]
    least = np.where(known, idle_s, np.inf).min(axis=1)
    there = np.isfinite(least)
    out[:] = np.median(np.maximum(least[there], 0.0)) if there.any() else 0.0
    out[:-1][there] = np.maximum(least[there], 0.0)
    return out
