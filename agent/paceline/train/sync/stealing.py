"""FlexRR's work stealing: a rank that is ahead takes over part of a slower rank's next batch.

A training loop's body takes one batch per step. So `paceline.core.stealing` decides what moves when
a batch is about to be loaded. The rank that is ahead enlarges its own batch; the slower rank then
loads the fewer samples. Each batch is closed once in the ranks' store, by its owner or by the rank
that takes from it: so no sample is lost or used twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from paceline.core.stealing import Piece, Standing
from paceline.train.parts import Part, Step

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

Floats = npt.NDArray[np.float64]

_CLOSED = "own"


class Queues(msgspec.Struct, frozen=True, array_like=True):
    """All ranks' parts of a segment, with the sizes of their samples."""

    parts: list[Part]
    sizes: list[bytes]  # little-endian float64, of each rank's samples in order


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Queues)


def queues_key(segment: int) -> str:
    """Where a segment's queues lie in the store."""
    return f"seg/{segment}/queues"


def put(store: Store, parts: list[Part], sizes: list[Floats]) -> None:
    """Puts a segment's queues before the ranks."""
    segment = parts[0].segment
    queues = Queues(parts, [of_rank.astype("<f8").tobytes() for of_rank in sizes])
    store.set(queues_key(segment), _encoder.encode(queues))  # type: ignore[arg-type]


class Stealing:
    """One rank's view of the segment's queues. For one thread.

    Args:
        store: the ranks'.
        rank: which of them.
        lookahead: steps that each rank loads before it trains with them.
        limit: the most samples that fit into this rank's memory; None: any number.
        by_size: the loss is a mean over size units; else over samples.
    """

    def __init__(
        self, store: Store, rank: int, lookahead: int, limit: int | None, *, by_size: bool
    ) -> None:
        self._store, self._rank, self._lookahead = store, rank, lookahead
        self._limit, self._by_size = limit, by_size
        self._segment = -1  # of the queues at hand:
        self._steps: list[list[Step]] = []  # [rank][step]
        self._counts: list[list[int]] = []  # of samples, and
        self._sizes: list[list[Floats]] = []
        self._closed: list[str] = []  # keys of own batches in the segment;
        self._before: deque[tuple[int, list[str]]] = deque()  # segments, with those before each

    def batch(self, step: Step, clocks: list[int] | None) -> Step:
        """The step as it is to be loaded: less what others took, with what this rank takes.

        Args:
            step: as planned for this rank.
            clocks: steps of the segment that ranks are through with, as far as is known, [W]; None:
                nothing is.
        """
        if step.segment != self._segment:
            self._read(step.segment)
        at = step.step - self._steps[self._rank][0].step
        key = self._key(self._rank, at)
        self._closed.append(key)
        word = self._store.compare_set(key, "", _CLOSED).decode()
        if word != _CLOSED:
            keep = len(step.indices) - int(word.split()[0])
            return self._of(step, [Piece(self._rank, at, 0, keep)])
        taken = self._take(step, at, clocks) if clocks is not None else None
        if taken is None:
            return step
        return self._of(step, [Piece(self._rank, at, 0, len(step.indices)), taken])

    def _take(self, step: Step, at: int, clocks: list[int]) -> Piece | None:
        """The samples that this rank takes over, if it is the first who asks for them."""
        limit, standing = self._limit, Standing(clocks, self._counts, self._lookahead)
        room = None if limit is None else lambda: limit - len(step.indices)
        piece = standing.takes(self._rank, at, room)
        if piece is None:
            return None
        word = f"{piece.end - piece.first} {self._rank} {at}"  # no other's, nor of an earlier step
        if self._store.compare_set(self._key(piece.rank, piece.step), "", word).decode() != word:
            return None  # its owner has begun, or another rank was there before
        return piece

    def _read(self, segment: int) -> None:
        store, key = self._store, queues_key(segment)
        queues = _decoder.decode(store.get(key))
        # How far ranks are apart here is not bounded: some load far ahead.
        if store.add(f"{key}/read", 1) == len(queues.parts):
            store.delete_key(key)
            store.delete_key(f"{key}/read")
        self._before.append((segment, self._closed))
        self._closed = []
        while self._before and not store.check([queues_key(self._before[0][0])]):
            for closed in self._before.popleft()[1]:  # all ranks are in later segments
                store.delete_key(closed)
        self._segment = segment
        self._steps = [list(part.steps()) for part in queues.parts]
        self._counts = [part.counts for part in queues.parts]
        self._sizes = [
            np.split(np.frombuffer(sizes, "<f8"), np.cumsum(part.counts)[:-1])
            for part, sizes in zip(queues.parts, queues.sizes, strict=True)
        ]

    def _key(self, rank: int, at: int) -> str:
        return f"steal/{self._segment}/{at}/{rank}"

    def _of(self, step: Step, pieces: list[Piece]) -> Step:
        """The step made up of pieces of batches."""
        indices: list[int] = []
        weight, parts = 0.0, []
        for rank, at, first, end in pieces:
            planned, sizes = self._steps[rank][at], self._sizes[rank][at][first:end]
            indices += planned.indices[first:end]
            parts.append(sizes)
            if planned.indices:
                of_samples = (end - first) / planned.samples
                weight += planned.weight * (
                    float(sizes.sum()) / planned.load if self._by_size else of_samples
                )
        all_ = np.concatenate(parts)
        return replace(
            step,
            indices=indices,
            load=float(all_.sum()),
            squares=float((all_**2).sum()),
            longest=float(all_.max(initial=0.0)),
            weight=weight,
            ett_s=None,  # it was of the planned batch
        )
