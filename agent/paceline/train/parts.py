"""Parts of the plan: a rank's part of a segment, of one step, and what the script sees of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec.structs import replace

from paceline.data.keeper import NodePart
from paceline.wire.synchronisation import ALLREDUCE, Synchronisation

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Step(msgspec.Struct, frozen=True):
    """What one rank does in one step."""

    epoch: int
    step: int
    segment: int
    indices: list[int]
    load: float
    squares: float  # Σλ²
    longest: float
    weight: float  # of this rank's mean gradient in the update
    ett_s: float | None
    threads: int  # CPU threads to use; 0: as many as the script has
    even: bool = True  # all ranks have as many samples in it
    synchroniser: Synchronisation = ALLREDUCE
    last: bool = False  # the last step of its segment
    epoch_end: bool = False  # the last step of its epoch
    segment_first: int = 0  # the first step of its segment,
    segment_end: int = 0  # and the first one after it
    pooled: bool = False  # ranks take batches of the segment over from each other
    shared: bool = False  # this rank may train further batches under the same step's number
    planned: int | None = None  # of a batch that was taken over: the step that it was planned for
    micro: tuple[Step, ...] = ()  # the micro-batches that it is computed in; empty: it is in one
    share: float = 1.0  # of a micro-batch in the mean over this rank's batch
    place: int = 0  # of a micro-batch in its step
    more: bool = False  # further micro-batches follow, and then the optimiser steps

    @property
    def turns(self) -> tuple[Step, ...]:
        """What each turn of the script's loop is about: the step's micro-batches, or the step."""
        return self.micro or (self,)

    @property
    def samples(self) -> int:
        """n_j, the number of samples."""
        return len(self.indices)

    def without_batch(self) -> Step:
        """The step of a rank that has no batch in it."""
        return replace(
            self, indices=[], load=0.0, squares=0.0, longest=0.0, weight=0.0, ett_s=None, micro=()
        )


@dataclass(frozen=True)
class Batch:
    """This rank's part of the current step, or a micro-batch of it."""

    epoch: int
    step: int  # of the run, from 0, across epochs
    samples: int  # n_j; if 0, the batch is a filler
    load: float  # Λ_j, the sum of their sizes
    weight: float  # of the batch's mean gradient in the update
    last: bool = True  # the optimiser steps now; False: further micro-batches of the step follow

    @property
    def empty(self) -> bool:
        """Whether the batch is a filler, which your own metrics must leave out."""
        return self.samples == 0


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive samples of a rank's part of a step."""

    samples: int
    load: float
    squares: float
    longest: float
    share: float  # in the mean over the rank's part: of its samples or of its load


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a segment: an entry in the ranks' store, read once and then deleted."""

    epoch: int
    segment: int
    first_step: int
    counts: list[int]  # [steps] n_j
    loads: list[float]  # [steps] Λ_j
    weights: list[float]  # [steps] n_j/Σn or Λ_j/ΣΛ
    ett_s: list[float]  # [steps], expected compute time; empty if unknown
    indices: bytes  # little-endian uint32, all steps in order
    epoch_end: bool
    squares: list[float] = []  # [steps] Σλ²
    longest: list[float] = []  # [steps] max λ
    threads: int = 0
    stop: bool = False
    synchroniser: Synchronisation = ALLREDUCE
    reform: bool = False  # with `stop`: nodes join or leave, and the ranks' processes end
    pooled: bool = False  # ranks take batches of the segment over from each other
    # [steps]: those that a step is computed in; empty: all of it at once
    micro: list[list[MicroBatch]] = []
    node: NodePart | None = None  # on the first rank of each node, where data lives on nodes
    uneven: list[int] = []  # steps of the segment, from 0, in which ranks have different numbers
    failed: str = ""  # with `stop`: why there is no more plan; empty: it was ended on purpose

    def steps(self) -> Iterator[Step]:
        """The steps in order."""
        indices = np.frombuffer(self.indices, dtype="<u4").tolist()
        end = 0
        for k, count in enumerate(self.counts):
            start, end = end, end + count
            step = Step(
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


def _micro_batches(step: Step, micro: list[MicroBatch]) -> Iterator[Step]:
    end = 0
    for place, each in enumerate(micro):
        start, end = end, end + each.samples
        yield replace(
            step,
            indices=step.indices[start:end],
            load=each.load,
            squares=each.squares,
            longest=each.longest,
            weight=step.weight * each.share,
            share=each.share,
            place=place,
            more=place < len(micro) - 1,
        )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Part)


def encode_part(part: Part) -> bytes:
    """A part as the ranks' store holds it."""
    return _encoder.encode(part)


def decode_part(data: bytes) -> Part:
    """The reverse of `encode_part`."""
    return _decoder.decode(data)


def part_key(segment: int, rank: int) -> str:
    """The store's key of a rank's part of a segment."""
    return f"seg/{segment}/{rank}"


def get_part(store: Store, segment: int, rank: int) -> Part:
    """A rank's part of a segment; waits until the leader has stored it.

    Raises:
        torch.distributed.DistError: rank 0 has ended, or stored nothing for too long.
    """
    return decode_part(store.get(part_key(segment, rank)))


def put_part(store: Store, segment: int, rank: int, part: Part) -> None:
    """Stores a rank's part of a segment."""
    store.set(part_key(segment, rank), encode_part(part))  # type: ignore[arg-type]


def left_key(rank: int) -> str:
    """The store's key by which a rank says that it reads no more segments."""
    return f"left/{rank}"
