"""The ledger of a stream's epoch: the samples that ranks have read, and those that they train next.

The leader records the ranks' reports in a `StreamLedger` and takes the next steps from it. For each
step, `counts_in_time` returns each rank's number of samples so that all ranks end together,
`loads_in_time` returns the load that each rank trains in the step, and `picked` returns samples
of a rank's buffer with about that load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.dealing import equal_counts
from paceline.core.ledger import BatchRules
from paceline.wire import ALLREDUCE, Assignment, Paces, Plan, pack_samples

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# Minimum number of global batches that the ranks' buffers hold together.
LEAST_BATCHES = 4
# A sample that this many steps have passed over is no longer exchanged for a later sample.
WAITS = 8
# A segment has a single step, or it uses at most 1 / `_SPENT` of the buffered samples, so that its
# last step, too, can choose among many samples.
_SPENT = 4
# If a rank would end later than this multiple of the planned time, the other ranks get more load.
_LATE = 1.02
_TIME_BISECTIONS = 60
# Maximum number of samples that a rank swaps for later ones of its buffer in a step.
_SWAPS = 4
# A rank stops swapping once its load differs from the target load by less than this fraction.
_LOAD_TOLERANCE = 1e-3


@dataclass
class _Buffer:
    """The samples that a rank has read and not trained, in the order in which steps take them."""

    # Sample numbers in the epoch.
    numbers: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    keys: Floats = field(default_factory=lambda: np.empty(0))  # sort keys of `numbers`, ascending
    # Number of samples that the rank has read in this epoch.
    read: int = 0
    # True if the rank has read all its samples.
    ended: bool = False


class StreamLedger:
    """A record of the samples of one epoch of a stream. Not thread-safe.

    The leader adds the ranks' reports with `record`, waits until the ledger is `ready`, and takes
    the next steps with `coast` or `filled`. Then the leader records these steps with `use`.

    Args:
        rules: the rules that each step's batch follows; a stream has neither a grid nor a budget.
        buffer: number of samples in all ranks' buffers together, at least `LEAST_BATCHES` global
            batches.
        seed: seed of the shuffling in the buffers; None: buffers keep the order of the source.
    """

    def __init__(
        self, epoch: int, world: int, rules: BatchRules, buffer: int, seed: int | None
    ) -> None:
        self.epoch = epoch
        # Arrays that are indexed by sample number. The arrays are longer than the number of
        # reported samples, so that they seldom grow.
        self._sizes, self._places = np.zeros(buffer), np.zeros(buffer, np.int64)
        # For each sample, the number of steps that passed it over.
        self._waited = np.zeros(buffer, np.int64)
        # Number of reported samples.
        self._count = 0
        # Number of reported samples that are not used yet.
        self.left = 0
        # Speeds by which batches are balanced while the leader coasts.
        self.paces: Paces | None = None
        self._buffers = [_Buffer() for _ in range(world)]
        self._rules, self._buffer = rules, buffer
        # Each rank has a generator of its own, so that a rank's draws do not depend on when other
        # ranks report their samples.
        self._rngs = [
            None if seed is None else np.random.default_rng((seed, epoch, rank))
            for rank in range(world)
        ]
        # Each rank's share of the samples in the newest steps.
        self._shares = np.full(world, 1 / world)

    @property
    def sizes(self) -> Floats:
        """The size λ of each reported sample, by its number."""
        return self._sizes[: self._count]

    @property
    def places(self) -> Ints:
        """For each reported sample, the number of samples that its rank had read before it."""
        return self._places[: self._count]

    @property
    def ended(self) -> bool:
        """True if all ranks have read all their samples."""
        return all(buffer.ended for buffer in self._buffers)

    @property
    def ended_ranks(self) -> list[bool]:
        """For each rank, True if it has read all its samples."""
        return [buffer.ended for buffer in self._buffers]

    @property
    def known(self) -> list[int]:
        """Number of samples that each rank has reported."""
        return [buffer.read for buffer in self._buffers]

    @property
    def rooms(self) -> list[int]:
        """Number of samples for each rank's buffer; 0 for a rank that has read all its samples."""
        reads = np.array([not buffer.ended for buffer in self._buffers])
        shares = np.where(reads, np.maximum(self._shares, 1e-3), 0.0)
        if not reads.any():
            return [0] * len(self._buffers)
        rooms = np.ceil(self._buffer * shares / shares.sum()).astype(int)
        return [int(room) for room in rooms]

    def record(self, rank: int, sizes: Floats, *, ended: bool) -> None:
        """Record the sizes λ of samples that a rank has read.

        `ended` is True if the rank will read no more samples in this epoch.
        """
        buffer = self._buffers[rank]
        numbers = np.arange(self._count, self._count + len(sizes))
        places = np.arange(buffer.read, buffer.read + len(sizes))
        self._count += len(sizes)
        while self._count > len(self._sizes):
            self._sizes, self._places, self._waited = (
                np.concatenate([column, np.zeros_like(column)])
                for column in (self._sizes, self._places, self._waited)
            )
        self._sizes[numbers], self._places[numbers] = sizes, places
        keys = places.astype(float)
        if (rng := self._rngs[rank]) is not None:
            keys += rng.random(len(sizes)) * self._buffer / len(self._buffers)
        keys = np.concatenate([buffer.keys, keys])
        order = np.argsort(keys, kind="stable")
        buffer.keys = keys[order]
        buffer.numbers = np.concatenate([buffer.numbers, numbers])[order]
        buffer.read += len(sizes)
        buffer.ended = ended
        self.left += len(sizes)

    def ready(self) -> bool:
        """Return True if a segment can be planned; False if more reports of ranks are needed."""
        if self.ended:
            return True
        halves = zip(self._buffers, self.rooms, strict=True)
        if any(not b.ended and len(b.numbers) < max(1, room // 2) for b, room in halves):
            return False
        return self._steps_at_most() > 0

    def _steps_at_most(self) -> int:
        if self.ended:
            full, rest = divmod(self.left, self._rules.global_batch)
            return full + (rest > 0 and not self._rules.drop_last)
        # If an incomplete last step is dropped, one global batch is held back. Whether the epoch
        # has another step depends on the samples that are left once all ranks have ended.
        batch = self._rules.global_batch
        spare = batch if self._rules.drop_last else 0
        most = (self.left - spare) // batch
        return max(min(1, most), self.left // (_SPENT * batch))

    @property
    def finished(self) -> bool:
        """True if no step is left."""
        return self.finished_with(self.left)

    def finished_with(self, left: int) -> bool:
        """Return True if no step is left when `left` of the reported samples are left."""
        return self.ended and self._rules.epoch_finished(left)

    def used(self) -> Ints:
        """Return the samples used so far, ascending."""
        waiting = np.concatenate([buffer.numbers for buffer in self._buffers])
        return np.setdiff1d(np.arange(self._count), waiting)

    def use(self, indices: Ints) -> None:
        """Record that the samples returned by `coast` or `filled` are used."""
        self.left -= len(indices)

    def refusal(self, plan: Plan, world: int) -> str | None:
        """Return the reason why a proposal cannot be this epoch's next segment; None if it can."""
        if plan.epoch != self.epoch:
            return f"it is for epoch {plan.epoch}, not {self.epoch}"
        if plan.synchroniser != ALLREDUCE:
            return (
                f"{plan.synchroniser.name} lets ranks get ahead of each other, which "
                "streams do not support"
            )
        if plan.indices:
            return "it lists samples, but the leader chooses the samples of a stream"
        return plan.defect(world)

    def filled(self, plan: Plan) -> Plan:
        """Return a proposed segment after choosing its samples; the result may have fewer steps."""
        paces = plan.paces
        parts = self._take(plan.steps, paces if plan.shares else None)
        assignment = Assignment.of(parts, len(plan.counts[0]))
        ett_s: list[list[float]] = []
        if paces is not None:
            speeds = Speeds(paces)
            for step in parts:
                lengths = np.array([len(part) for part in step])
                load = np.array([self.sizes[part].sum() for part in step])
                ett_s.append(speeds.step_s(lengths, load).tolist())
        return msgspec.structs.replace(
            plan,
            counts=assignment.counts.tolist(),
            indices=pack_samples(assignment.samples),
            ett_s=ett_s,
            epoch_end=self.finished_with(self.left - len(assignment.samples)),
        ).keeping(assignment)

    def coast(
        self,
        steps: int,
        world: int,
        sizes: Floats,
        shares: Sequence[float],
        homes: tuple[Ints, Ints] | None = None,
    ) -> list[list[Ints]]:
        """Return assignments [step][rank] of the next steps; see `Ledger.coast`.

        Without `shares` all ranks get equal numbers of samples. With `shares`, batches are
        balanced by the ranks' speeds in `paces`; the values of `shares` do not matter.
        """
        return self._take(steps, self.paces if shares else None)

    def _take(self, steps: int, paces: Paces | None) -> list[list[Ints]]:
        speeds = None if paces is None else Speeds(paces)
        before = [len(buffer.numbers) for buffer in self._buffers]
        steps = min(steps, self._steps_at_most())
        taken = [self._step(speeds) for _ in range(steps)]
        counts = np.array(before) - [len(buffer.numbers) for buffer in self._buffers]
        if not any(self.ended_ranks):
            self._shares = counts / counts.sum()
        return taken

    def _step(self, speeds: Speeds | None) -> list[Ints]:
        held = [self.sizes[buffer.numbers] for buffer in self._buffers]
        most = np.array([len(sizes) for sizes in held])
        if self._rules.limits is not None:
            most = np.minimum(most, self._rules.limits)
        total = min(self._rules.global_batch, int(most.sum()))
        if speeds is None:
            counts = equal_counts(total, most)
            places = [np.arange(count) for count in counts]
        else:
            typical = np.array([sizes.mean() if len(sizes) else 1.0 for sizes in held])
            counts = counts_in_time(total, typical, most, speeds)
            places = self._in_time(held, counts, typical, speeds)
        return [
            self._remove(buffer, at, int(count))
            for buffer, at, count in zip(self._buffers, places, counts, strict=True)
        ]

    def _in_time(
        self, held: list[Floats], counts: Ints, typical: Floats, speeds: Speeds
    ) -> list[Ints]:
        """Choose samples of the ranks' buffers such that all ranks end the step together.

        Return the samples' places in the buffers, an array for each rank. `held` has the sizes of
        the samples in each buffer; for `typical` see `counts_in_time`.
        """
        step_s, loads = loads_in_time(counts, typical, speeds)
        due = [self._waited[buffer.numbers] >= WAITS for buffer in self._buffers]
        places = _picked_all(held, counts, loads, due)
        load = np.array([sizes[at].sum() for sizes, at in zip(held, places, strict=True)])
        latest_s = float(speeds.step_s(counts, load).max())
        # The last rank to end cannot end earlier, so the other ranks get more load to end with it.
        if latest_s > _LATE * step_s:
            loads = speeds.load_in(latest_s, counts)
            places = _picked_all(held, counts, loads, due)
        return places

    def _remove(self, buffer: _Buffer, places: Ints, count: int) -> Ints:
        """Remove the samples at `places` from a buffer; return their numbers.

        The other samples among the first `count` of the buffer count as passed over by this step.
        """
        numbers = buffer.numbers[places]
        stay = np.ones(len(buffer.numbers), bool)
        stay[places] = False
        self._waited[buffer.numbers[:count][stay[:count]]] += 1
        buffer.numbers, buffer.keys = buffer.numbers[stay], buffer.keys[stay]
        return numbers


def _picked_all(held: list[Floats], counts: Ints, loads: Floats, due: list[Bools]) -> list[Ints]:
    columns = zip(held, counts.tolist(), loads.tolist(), due, strict=True)
    return [picked(*of_rank) for of_rank in columns]


class Speeds:
    """Speeds of ranks: a rank's step with n samples of load Λ takes ``a·Λ + c·n + b`` seconds.

    `a`, `c` and `b` are arrays with a value for each rank.
    """

    def __init__(self, paces: Paces) -> None:
        self.a, self.c, self.b = np.array(paces.a), np.array(paces.c), np.array(paces.b)

    def step_s(self, counts: Ints, load: Floats) -> Floats:
        """Return each rank's step time in seconds; 0 for a rank without samples."""
        step_s: Floats = np.where(counts > 0, self.a * load + self.c * counts + self.b, 0.0)
        return step_s

    def load_in(self, step_s: float, counts: Ints) -> Floats:
        """Return the load that each rank trains in `step_s` seconds if it has `counts` samples."""
        load: Floats = (step_s - self.b - self.c * counts) / self.a
        return load


def counts_in_time(total: int, typical: Floats, most: Ints, speeds: Speeds) -> Ints:
    """Choose each rank's number of samples so that all ranks end a step together.

    The step has `total` samples. `most` is the maximum number of samples of each rank; the sum is
    at least `total`. `typical` is the mean size of the samples in each rank's buffer.
    """
    each_s = speeds.a * typical + speeds.c

    def counts_at(step_s: float) -> Floats:
        counts: Floats = np.clip((step_s - speeds.b) / each_s, 0, most)
        return counts

    low, high = 0.0, float((speeds.b + each_s * most).max())
    for _ in range(_TIME_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if counts_at(middle).sum() < total else (low, middle)
    counts = np.floor(counts_at(high) + 1e-9).astype(np.int64)
    while (extra := int(counts.sum()) - total) > 0:
        counts[np.argsort(-counts, kind="stable")[:extra]] -= 1
    while (missing := total - int(counts.sum())) > 0:
        able = np.flatnonzero(counts < most)
        after_s = speeds.b[able] + each_s[able] * (counts[able] + 1)
        counts[able[np.argsort(after_s, kind="stable")[:missing]]] += 1
    return counts


def loads_in_time(counts: Ints, typical: Floats, speeds: Speeds) -> tuple[float, Floats]:
    """Return a pair: the seconds that a step should take on all ranks, and each rank's load.

    The loads add up to the size that the step would have if each sample had the `typical` size of
    its rank's buffer. So steps prefer neither small nor large samples, and neither kind stays in
    the buffers for long.
    """
    busy = np.flatnonzero(counts)
    inverse = 1.0 / speeds.a[busy]
    waiting = ((speeds.b + speeds.c * counts)[busy] * inverse).sum()
    step_s = float(((counts * typical)[busy].sum() + waiting) / inverse.sum())
    return step_s, speeds.load_in(step_s, counts)


def picked(sizes: Floats, count: int, load: float | None, due: Bools) -> Ints:
    """Return the places, in a rank's buffer, of the `count` samples that it trains in a step.

    The rank trains the first `count` samples of its buffer. Some of these are exchanged for later
    samples if that brings their total size nearer to `load`; `load` None: no sample is exchanged.
    `sizes` has the sizes λ of the buffer's samples. `due` marks samples that many steps have passed
    over. A marked sample among the first `count` is not exchanged.
    """
    places = np.arange(count)
    if load is None or count in (0, len(sizes)):
        return places
    free = np.flatnonzero(~due[:count])
    rest = np.arange(count, len(sizes))
    rest = rest[np.argsort(sizes[rest], kind="stable")]
    for _ in range(_SWAPS):
        off = load - float(sizes[places].sum())
        if not len(free) or abs(off) <= _LOAD_TOLERANCE * load:
            break
        wanted = sizes[places[free]] + off
        after = np.searchsorted(sizes[rest], wanted)
        near = np.clip(np.stack([after - 1, after]), 0, len(rest) - 1)
        error = np.abs(sizes[rest[near]] - wanted)
        side, best = np.unravel_index(int(error.argmin()), error.shape)
        if error[side, best] >= abs(off):
            break
        at = int(near[side, best])
        places[free[best]], rest[at] = rest[at], places[free[best]]
        rest = rest[np.argsort(sizes[rest], kind="stable")]
    return places
