"""A rank's shard of the plan, its local steps, and the `Batch` that a script sees.

For each segment, the leader stores a `PlanShard` for each rank in the ranks' store. Most fields
that differ between steps are lists with an entry for each step. The leader encodes shards for
thousands of ranks, and lists encode faster than one object for each step. The follower reads the
shard and makes a `LocalStep` for each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from paceline.data.prefetcher import NodeShard
from paceline.wire.synchronisation import ALLREDUCE, Synchronisation

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class LocalStep(msgspec.Struct, frozen=True):
    """Description of one step, or of one of its micro-batches, on this rank."""

    epoch: int
    step: int
    segment: int
    indices: list[int]
    # Sum of the samples' sizes λ, sum of their squares, and the largest size.
    load: float
    squares: float
    longest: float
    # Weight of this rank's mean gradient in the update.
    weight: float
    # Compute time that the plan expects, in s; None: unknown.
    ett_s: float | None
    # Number of CPU threads to use; 0: the script's own number.
    threads: int
    # True if all ranks have the same number of samples in the step.
    even: bool = True
    synchroniser: Synchronisation = ALLREDUCE
    # True for the last step of its segment.
    last: bool = False
    epoch_end: bool = False
    # The first step of this step's segment, and the first step after that segment.
    segment_first: int = 0
    segment_end: int = 0
    # True if ranks take batches of the segment over from each other.
    pooled: bool = False
    # True if this rank may train further batches under the same step number.
    shared: bool = False
    # For a batch that was taken over from another rank: the step for which it was planned.
    planned: int | None = None
    # The micro-batches of the step, one for each iteration of the script's loop; empty: the step is
    # computed in one iteration.
    micro: tuple[LocalStep, ...] = ()
    # For a micro-batch: its weight in the mean over this rank's batch.
    share: float = 1.0
    # For a micro-batch: its index in the step, from 0.
    micro_index: int = 0
    # True if further micro-batches follow before the optimiser steps.
    more: bool = False

    @property
    def samples(self) -> int:
        """Return n_j, the number of samples."""
        return len(self.indices)

    def without_batch(self) -> LocalStep:
        """Return a copy without samples, for a rank that trains no batch in this step."""
        return replace(
            self, indices=[], load=0.0, squares=0.0, longest=0.0, weight=0.0, ett_s=None, micro=()
        )


@dataclass(frozen=True)
class Batch:
    """This rank's local batch of the current step, or a micro-batch of it.

    `step` counts from 0 over the whole run, across epochs.
    """

    epoch: int
    step: int
    # Number of samples n_j; 0: the batch is a filler.
    samples: int
    # Load Λ_j: the sum of the samples' sizes.
    load: float
    # Weight of the batch's mean gradient in the update.
    weight: float
    # True if the optimiser steps after this batch; False: further micro-batches of the step follow.
    last: bool = True

    @property
    def empty(self) -> bool:
        """Return True if the batch is a filler, which your own metrics must leave out."""
        return self.samples == 0


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive samples of a rank's local batch."""

    samples: int
    load: float
    squares: float
    longest: float
    # Weight of the micro-batch in the mean over the rank's local batch, by samples or by load.
    share: float


class PlanShard(msgspec.Struct, frozen=True, array_like=True):
    """One rank's shard of a segment: an entry in the ranks' store, read once and then deleted."""

    epoch: int
    segment: int
    first_step: int
    counts: list[int]  # [steps] numbers of samples n_j
    loads: list[float]  # [steps] loads Λ_j
    # Weights of this rank's mean gradient in the updates, [steps]: n_j/Σn, Λ_j/ΣΛ, or 1/M for M
    # ranks.
    weights: list[float]
    # Expected compute times in s, [steps]; empty: unknown.
    ett_s: list[float]
    # Indices of the samples of all steps in order, as little-endian uint32.
    indices: bytes
    epoch_end: bool
    squares: list[float] = []  # [steps] Σλ² over the step's samples of size λ
    longest: list[float] = []  # [steps] max λ
    threads: int = 0
    # True if no further segments follow this entry.
    stop: bool = False
    synchroniser: Synchronisation = ALLREDUCE
    # True, together with `stop`, if the ranks' processes must end because nodes join or leave.
    reform: bool = False
    pooled: bool = False
    # The micro-batches of each step, [steps]; empty: each step is computed in one pass.
    micro: list[list[MicroBatch]] = []
    # The node's shard of the segment; only for the first rank of each node, and only if data is
    # stored on nodes.
    node: NodeShard | None = None
    # Indices in the segment, from 0, of the steps in which ranks have different numbers of samples.
    uneven: list[int] = []
    # If `stop` is True: the reason why planning failed; empty: the plan was ended on purpose.
    failed: str = ""

    def steps(self) -> Iterator[LocalStep]:
        """Yield the steps in order."""
        indices = np.frombuffer(self.indices, dtype="<u4").tolist()
        end = 0
        for k, count in enumerate(self.counts):
            start, end = end, end + count
            step = LocalStep(
                self.epoch,
                self.first_step + k,
                self.segment,
                indices[start:end],
                self.loads[k],
                self.squares[k],
                self.longest[k],
                self.weights[k],
                self.ett_s[k] if self.ett_s else None,
                self.threads,
                k not in self.uneven,
                self.synchroniser,
                last=k == len(self.counts) - 1,
                epoch_end=self.epoch_end and k == len(self.counts) - 1,
                segment_first=self.first_step,
                segment_end=self.first_step + len(self.counts),
                pooled=self.pooled,
            )
            if self.micro and self.micro[k]:
                step = replace(step, micro=tuple(_micro_batches(step, self.micro[k])))
            yield step


def _micro_batches(step: LocalStep, micro: list[MicroBatch]) -> Iterator[LocalStep]:
    end = 0
    for micro_index, each in enumerate(micro):
        start, end = end, end + each.samples
        yield replace(
            step,
            indices=step.indices[start:end],
            load=each.load,
            squares=each.squares,
            longest=each.longest,
            weight=step.weight * each.share,
            share=each.share,
            micro_index=micro_index,
            more=micro_index < len(micro) - 1,
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PlanShard)


def encode_shard(shard: PlanShard) -> bytes:
    """Encode a shard for the ranks' store."""
    return _encoder.encode(shard)


def decode_shard(data: bytes) -> PlanShard:
    """Decode a shard from the ranks' store."""
    return _decoder.decode(data)


def shard_key(segment: int, rank: int) -> str:
    """Return the store's key of a rank's shard of a segment."""
    return f"seg/{segment}/{rank}"


def get_shard(store: Store, segment: int, rank: int) -> PlanShard:
    """Read a rank's shard of a segment; wait until the leader has stored it.

    A DistError means that rank 0 has ended, or stored nothing within the store's timeout.
    """
    return decode_shard(store.get(shard_key(segment, rank)))


def put_shard(store: Store, segment: int, rank: int, shard: PlanShard) -> None:
    """Store a rank's shard of a segment."""
    store.set(shard_key(segment, rank), encode_shard(shard))  # type: ignore[arg-type]


def left_key(rank: int) -> str:
    """Return the store's key that a rank sets when it reads no more segments."""
    return f"left/{rank}"
