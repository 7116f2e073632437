"""How a segment reaches the ranks: an entry per rank in their own store, read once and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from paceline.core.errors import PacelineError
from paceline.wire.synchronisation import ALLREDUCE, Synchronisation

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.train.leader import Leader


@dataclass(frozen=True)
class Step:
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
    threads: int  # CPU threads to use; 0: as they are
    synchroniser: Synchronisation = ALLREDUCE
    last: bool = False  # of its segment,
    epoch_end: bool = False  # and of its epoch

    @property
    def samples(self) -> int:
        """n_j."""
        return len(self.indices)


@dataclass(frozen=True)
class Batch:
    """This rank's part of the step in hand."""

    epoch: int
    step: int  # of the run, from 0, across epochs
    samples: int  # n_j; 0: the batch is a filler
    load: float  # Λ_j, the sum of their sizes
    weight: float  # of this rank's mean gradient in the update

    @property
    def empty(self) -> bool:
        """Whether the batch is a filler: leave it out of your own metrics."""
        return self.samples == 0


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One rank's part of a segment."""

    epoch: int
    segment: int
    first_step: int
    counts: list[int]  # [steps] n_j
    loads: list[float]  # [steps] Λ_j
    weights: list[float]  # [steps] n_j/Σn or Λ_j/ΣΛ
    ett_s: list[float]  # [steps], or empty: unknown
    indices: bytes  # little-endian uint32, all steps in order
    epoch_end: bool
    squares: list[float] = []  # [steps] Σλ²
    longest: list[float] = []  # [steps] max λ
    threads: int = 0
    stop: bool = False
    synchroniser: Synchronisation = ALLREDUCE

    def steps(self) -> Iterator[Step]:
        """Its steps in order."""
        indices = np.frombuffer(self.indices, dtype="<u4").tolist()
        end = 0
        for k, count in enumerate(self.counts):
            start, end = end, end + count
            yield Step(
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
                self.synchroniser,
                last=k == len(self.counts) - 1,
                epoch_end=self.epoch_end and k == len(self.counts) - 1,
            )


def part_key(segment: int, rank: int) -> str:
    """Where a rank's part of a segment lies in the store."""
    return f"seg/{segment}/{rank}"


def left_key(rank: int) -> str:
    """Where a rank says in the store that it will read no more."""
    return f"left/{rank}"


_decoder = msgspec.msgpack.Decoder(Part)


class Plan:
    """A rank's view of the plan. For one thread.

    Args:
        store: the ranks' store.
        rank: whose parts to read.
        leader: on the leader's rank, who makes the segments.
    """

    def __init__(self, store: Store, rank: int, leader: Leader | None) -> None:
        self._store = store
        self._rank = rank
        self._leader = leader
        self._segment = 0
        self.stopped = False

    def steps(self, epoch: int) -> Iterator[Step]:
        """The steps of an epoch, blocking for each segment until the leader has put it there.

        Raises:
            PacelineError: the ranks are not in the same epoch.
            torch.distributed.DistError: the leader is gone, or silent for the store's timeout.
        """
        while not self.stopped:
            part = self._next(epoch)
            if part.stop:
                self.stopped = True
            elif part.epoch == epoch:
                yield from part.steps()
                if part.epoch_end:
                    return
            elif part.epoch > epoch:
                raise PacelineError(
                    f"rank {self._rank} is in epoch {epoch} but the leader in {part.epoch}: "
                    "every rank must iterate over the loader equally often"
                )
            # else: the rest of an epoch that all ranks left early

    def _next(self, epoch: int) -> Part:
        if self._leader is not None:
            self._leader.advance(epoch)
        key = part_key(self._segment, self._rank)
        part = _decoder.decode(self._store.get(key))
        self._store.delete_key(key)
        self._segment += 1
        return part
