"""The plan of a segment, a few consecutive steps: which samples each rank gets, and why.

The planner returns a `Plan`, the leader adopts it, the bus carries it and the database keeps it:

1. A policy's scheduler divides samples as an `Assignment`. `policies.plan` makes the plan from it,
   and `planning.offer` adds what the policy does not know.
2. The controller sends the plan to the leader in a `Proposal`. If no proposal arrives in time, the
   leader makes a plan itself. For a stream, the leader picks the samples, using the plan's `Paces`.
3. The leader adopts the plan and stores a `PlanShard` of it for each rank. A rank unpacks its
   shard into a `LocalStep` for each step, and the script sees the step's `Batch`
   (`paceline.train.plan_shard`).
4. The leader announces the plan as `Adopted`. Ingest stores it in the database, where
   controllers, charts and `paceline replay` read it.

A field named `segment` holds the number of a segment, `Plan.seq`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.wire import defects
from paceline.wire.shards import Moves
from paceline.wire.synchronisation import ALLREDUCE, Synchronisation

Ints = npt.NDArray[np.int64]

# Bound for step numbers: JSON and doubles represent smaller numbers exactly.
MOST_STEPS = 2**53

# Bounds of database columns of 32 and 64 bits.
_INT, _BIG = 2**31, 2**63
_BOUNDS = {
    "seq": _BIG,
    "epoch": _INT,
    "first_step": MOST_STEPS,
    "steps": _INT,
    "version": _INT,
    "moved": _INT,
    "across": _INT,
}
# Maximum number of steps in a range of feedback.
_LONGEST_RANGE = 2**20
_MOST_THREADS = 65_536
# Minimum of a share that is not 0, so that dividing by the share gives a finite number.
_SMALLEST_SHARE = 1e-9
# Sources of plans that a policy made: a controller, or rank 0 while no controller plans.
CONTROLLER, LOCAL = "controller", "local"
PLANNED = (CONTROLLER, LOCAL)
_SOURCES = (*PLANNED, "coast", "equal")
# Maximum number of seconds per size unit, sample or step. With larger numbers, step times that are
# computed from them might not be finite.
_MOST_PACE = 1e6


class Paces(msgspec.Struct, frozen=True):
    """Linear model of step times.

    For a step with n samples of total size Λ, rank j needs ``a[j]·Λ + c[j]·n + b[j]`` seconds.
    """

    # Seconds per size unit, for each rank, above 0 and at most 1e6.
    a: list[float]
    # Seconds per sample, for each rank, 0 to 1e6.
    c: list[float]
    # Seconds per step, for each rank, 0 to 1e6.
    b: list[float]

    def defect(self, width: int) -> str | None:
        """Return the first defect in the values for `width` ranks; None if there is none."""
        for name, least in (("a", 1e-100), ("c", 0.0), ("b", 0.0)):
            values: list[float] = getattr(self, name)
            if len(values) != width:
                return f"paces.{name} has {len(values)} values for {width} ranks"
            # The comparison is false for NaN, too.
            if not all(least <= value <= _MOST_PACE for value in values):
                return f"paces.{name} holds a value that is not from {least:g} to {_MOST_PACE:g}"
        return None


@dataclass(frozen=True)
class Assignment:
    """The samples of each rank in each step of a segment. No caller may modify the arrays."""

    # Number of samples of each step and rank.
    counts: Ints  # [steps, ranks]
    # Indices of the samples, ordered by step, and by rank within a step.
    samples: Ints  # [counts.sum()]

    @staticmethod
    def of(parts: Sequence[Sequence[Ints]], world: int) -> Assignment:
        """Make an assignment from ``[step][rank]`` arrays."""
        counts = np.array([[len(part) for part in step] for step in parts], np.int64)
        flat = [part for step in parts for part in step]
        samples = np.concatenate(flat) if flat else np.empty(0)
        return Assignment(counts.reshape(-1, world), samples.astype(np.int64, copy=False))

    @staticmethod
    def joined(counts: Sequence[Ints], samples: Sequence[Ints], world: int) -> Assignment:
        """Make an assignment from each step's counts per rank and its samples, ordered by rank."""
        flat = np.concatenate(samples) if samples else np.empty(0, np.int64)
        return Assignment(np.array(counts, np.int64).reshape(-1, world), flat)

    @cached_property
    def parts(self) -> list[list[Ints]]:
        """The samples as ``[step][rank]`` arrays, some of which may be empty."""
        ends = np.cumsum(self.counts)
        flat = np.split(self.samples, ends[:-1]) if len(ends) else []
        world = self.counts.shape[1]
        return [flat[at : at + world] for at in range(0, len(flat), world)]

    def ranks(self) -> Ints:
        """Return the rank of each of `samples`."""
        world = self.counts.shape[1]
        ranks = np.tile(np.arange(world), len(self.counts))
        return np.repeat(ranks, self.counts.ravel())


class Plan(msgspec.Struct, frozen=True, dict=True):
    """The plan of steps [first_step, first_step + len(counts)), all in one epoch, and its origin.

    A plan can be reproduced: given the run's sizes and the records of the steps in `feedback`, the
    same policy code makes the same plan.

    `defect` validates a plan once, where the plan enters a process. The leader calls it before it
    adopts a proposal, and ingest before it stores an adopted plan, so every plan that a leader
    adopts can be stored. Ingest may get a plan before its attempt's Hello, so code that reads both
    of them calls `misfit`.
    """

    # Number of the segment among the adopted segments of this attempt, from 0.
    seq: int
    epoch: int
    first_step: int
    # Number of samples of each rank in each step, [step][rank].
    counts: list[list[int]]
    # Sample indices of all steps and ranks in order: little-endian uint32; see `assignment`.
    indices: bytes
    # Name of the preset.
    policy: str
    # Policy version of the run: 0 at the start; each switch adds 1.
    version: int
    # Origin of the plan. "controller"; "local": rank 0 planned with the policy, because no
    # controller did; "coast": the leader repeated the last split, because no proposal came in time;
    # or "equal": the leader planned with equal local batches, because the script's loss
    # allows no others.
    source: str
    epoch_end: bool
    # Forecast of each rank's compute time in each step, [step][rank] s; empty: unknown.
    ett_s: list[list[float]] = []
    # Each rank's share of the load, which the leader uses while coasting; empty: equal counts.
    shares: list[float] = []
    # Half-open ranges of the steps whose records the predictor used.
    feedback: list[tuple[int, int]] = []
    # True if the shuffler ran before this segment was scheduled.
    shuffled: bool = False
    # Number of samples that moved to another rank, because the shuffler or the scheduler gave them
    # to that rank.
    moved: int = 0
    plan_s: float = 0.0
    # State that the policy gets back when it plans the next segment.
    memory: dict[str, Any] = {}
    # CPU threads of each rank; empty: as the script set them.
    threads: list[int] = []
    synchroniser: Synchronisation = ALLREDUCE
    # For the operator: why this synchronisation was chosen, or why local batches are equal. Empty:
    # the policy has only one synchronisation.
    why: str = ""
    # Number of the `moved` samples whose new rank is on another node.
    across: int = 0
    # True if ranks take batches over from each other; the leader decides.
    pooled: bool = False
    # For data that is stored on nodes: the samples that move to another rank with the next epoch.
    # None: this segment does not plan the next epoch.
    moves: Moves | None = None
    # True if each node trains the samples that it stores, even while coasting.
    homes: bool = False
    # For a stream: the speeds of ranks. A proposal with `paces` has no samples, because the leader
    # picks them.
    paces: Paces | None = None
    # True if this segment was planned without the previous segment's `memory`, which was lost.
    anew: bool = False

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.counts)

    @cached_property
    def assignment(self) -> Assignment:
        """`counts` and `indices` as arrays."""
        samples = np.frombuffer(self.indices, dtype="<u4").astype(np.int64)
        return Assignment(np.array(self.counts, np.int64), samples)

    def keeping(self, assignment: Assignment) -> Plan:
        """Cache the assignment from which this plan was packed; return this plan."""
        self.__dict__["assignment"] = assignment
        return self

    def defect(self, world: int | None = None, samples: int | None = None) -> str | None:
        """Return the reason why no leader may adopt the plan; None if it is valid by itself.

        `world` is the number of ranks of the attempt, `samples` the size of the data set; None:
        unknown.
        """
        width = world or 0
        if world is None and self.counts:
            width = len(self.counts[0])
        return (
            defects.of_whole(self, _BOUNDS)
            or defects.of_times(self, ("plan_s",))
            or _of_texts(self)
            or _of_counts(self, width)
            or self.misfit(world, samples)
            or _of_forecast_and_feedback(self, width)
            or _of_threads(self.threads, width)
            or defects.of_plain(self.memory, "memory")
            or (None if self.paces is None else self.paces.defect(width))
        )

    def misfit(self, world: int | None, samples: int | None) -> str | None:
        """Return the reason why a valid plan does not fit its attempt; None if it does.

        For `world` and `samples` see `defect`.
        """
        width = len(self.counts[0])
        if world is not None and width != world:
            return _misshapen(world)
        return (
            _of_indices(self, samples)
            or self.synchroniser.defect(world)
            or (None if self.moves is None else self.moves.defect(width, samples))
        )


def pack_samples(samples: Ints) -> bytes:
    """Pack `Assignment.samples` into the bytes `Plan.indices`."""
    return samples.astype("<u4").tobytes()


def _of_texts(plan: Plan) -> str | None:
    if plan.source not in _SOURCES:
        return f"source is {plan.source!a}: it must be 'controller', 'local', 'coast' or 'equal'"
    return defects.of_text(plan.policy, "policy") or defects.of_text(plan.why, "why")


def _of_counts(plan: Plan, width: int) -> str | None:
    if not plan.counts:
        return "counts is empty: a segment has at least one step"
    if not width or any(len(row) != width for row in plan.counts):
        return _misshapen(width or 1)
    if not all(min(row) >= 0 and max(row) < _INT for row in plan.counts):
        return "counts holds a number that is negative or too large"
    total = sum(map(sum, plan.counts))
    if len(plan.indices) != 4 * total:
        return f"indices has {len(plan.indices)} bytes for {total} samples"
    return None


def _misshapen(width: int) -> str:
    return f"counts does not have the shape [steps][{width} ranks]"


def _of_indices(plan: Plan, samples: int | None) -> str | None:
    if samples is None or not plan.indices:
        return None
    # `assignment` would copy the indices and keep the copy, which most callers do not need yet.
    most = int(np.frombuffer(plan.indices, "<u4").max())
    return (
        f"indices holds sample {most}, but there are {samples} samples" if most >= samples else None
    )


def _of_forecast_and_feedback(plan: Plan, width: int) -> str | None:
    if plan.ett_s and [len(row) for row in plan.ett_s] != [width] * plan.steps:
        return "ett_s does not have the shape of counts"
    if not all(all(map(math.isfinite, row)) for row in plan.ett_s):
        return "ett_s holds a value that is not finite"
    if plan.shares and not _are_shares(np.asarray(plan.shares), width):
        return f"shares {plan.shares} are not valid for {width} ranks"
    for start, end in plan.feedback:
        if not 0 <= start < end <= min(start + _LONGEST_RANGE, MOST_STEPS):
            return f"feedback holds {[start, end]}, which is not a valid range of steps"
    return None


def _are_shares(shares: npt.NDArray[np.float64], width: int) -> bool:
    fit = np.isfinite(shares) & ((shares == 0) | (shares >= _SMALLEST_SHARE))
    return len(shares) == width and bool(fit.all()) and 0 < shares.sum() < np.inf


def _of_threads(threads: list[int], width: int) -> str | None:
    if not threads or (
        len(threads) == width and 1 <= min(threads) <= max(threads) <= _MOST_THREADS
    ):
        return None
    return (
        f"threads {threads} are not valid for {width} ranks: give each 1 to {_MOST_THREADS} threads"
    )
