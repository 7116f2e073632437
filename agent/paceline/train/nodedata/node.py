"""A rank's data on its node: what its batches missed there, and what is told of an epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from paceline.data import Sharded
from paceline.data.keeper import Keeper, NodePart
from paceline.data.sharded import Misses
from paceline.wire import DataEpoch, Message, Shards

_WAIT_S = 1e-3  # a step that waits for less for a read from the source has not waited for it


class Loaded(NamedTuple):
    """A batch, and what was not on the node when it was loaded."""

    batch: Any
    misses: tuple[int, int, float]  # of a `Misses`


class Counting:
    """A collate function that also tells what the batch's samples missed on the node.

    Samples and collate function of a batch run in the same process, one batch after the other.

    Args:
        data: that the samples are of.
        collate: the script's.
    """

    def __init__(self, data: Sharded, collate: Callable[[Any], Any] | None) -> None:
        self._data = data
        self._collate = collate or default_collate

    def __call__(self, samples: Any) -> Loaded:
        """A batch of the samples."""
        missed = self._data.take_misses()
        batch = self._collate(samples)
        return Loaded(batch, (missed.samples, missed.bytes, missed.waited_s))


class NodeData:
    """A rank's data on its node. The keeper runs in the first rank of each node.

    Args:
        data: the data set.
        rank: this rank.
        node: the node's name, for records.
        shards: of all nodes.
        keeper: of this node; None on its other ranks.
        attempt: of the run.
    """

    def __init__(
        self,
        data: Sharded,
        rank: int,
        node: str,
        shards: Shards,
        keeper: Keeper | None,
        attempt: int,
    ) -> None:
        self.shards = shards
        self.send: Callable[[Message], None] | None = None  # to the control plane, if there is one
        self._data, self._rank, self._node, self._attempt = data, rank, node, attempt
        self._keeper = keeper
        self._misses = Misses()  # in this epoch
        self._waits = 0
        self._waited_s = 0.0

    def take(self, part: NodePart) -> None:
        """Takes in what a segment says about this node. For any thread."""
        if self._keeper is not None:
            self._keeper.take(part)

    def loading(self) -> None:
        """Batches are loaded from here on. What this process read before is no miss of theirs.

        Call it before the DataLoader makes its processes: they take over what is counted here.
        """
        self._data.take_misses()

    def unpacked(self, loaded: Loaded, data_s: float) -> Any:
        """The batch, once its misses are counted.

        Args:
            loaded: by a `Counting`.
            data_s: how long the script waited for it.
        """
        misses = Misses(*loaded.misses)
        self._misses += misses
        waited_s = min(data_s, misses.waited_s)
        if misses.samples and waited_s >= _WAIT_S:
            self._waits += 1
            self._waited_s += waited_s
        return loaded.batch

    def epoch_over(self, epoch: int) -> DataEpoch:
        """What the epoch was like; sent to the control plane, if there is one."""
        keeper, misses = self._keeper, self._misses
        moved = keeper.moved(epoch) if keeper is not None else None
        record = DataEpoch(
            attempt=self._attempt,
            rank=self._rank,
            epoch=epoch,
            node=self._node,
            planned_bytes=moved.planned_bytes if moved else 0,
            moved_bytes=moved.bytes if moved else 0,
            moved=moved.samples if moved else 0,
            moved_s=moved.seconds if moved else 0.0,
            read_bytes=misses.bytes,
            read=misses.samples,
            waits=self._waits,
            waited_s=self._waited_s,
            held_bytes=self._data.directory.used_bytes if moved else 0,
            at=time.time(),
        )
        self._misses, self._waits, self._waited_s = Misses(), 0, 0.0
        if self.send is not None:
            self.send(record)
        return record

    def close(self) -> None:
        """Ends the keeper."""
        if self._keeper is not None:
            self._keeper.close()
