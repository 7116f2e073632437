"""A rank's data on its node: counts the samples that batches missed, and records each epoch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import default_collate

from paceline.data import Sharded
from paceline.data.keeper import NodePart, Prefetcher
from paceline.data.sharded import Misses
from paceline.train.feature import Feature
from paceline.wire import DataEpoch, Message, Shards

# A step that waits for a read from the source for less than this has not waited for it.
_WAIT_S = 1e-3


class Loaded(NamedTuple):
    """A batch, with the fields of a `Misses`: the samples that were not on the node."""

    batch: Any
    misses: tuple[int, int, float]


class Counting:
    """A collate function that also counts the batch's samples that were not on the node.

    The loading of a batch's samples and its collate function run in the same process, one batch
    after the other.
    """

    def __init__(self, data: Sharded, collate: Callable[[Any], Any] | None) -> None:
        self._data = data
        self._collate = collate or default_collate

    def __call__(self, samples: Any) -> Loaded:
        """Collate the samples."""
        missed = self._data.take_misses()
        batch = self._collate(samples)
        return Loaded(batch, (missed.samples, missed.bytes, missed.waited_s))


class NodeData(Feature):
    """A rank's data on its node. The keeper runs in the first rank of each node."""

    def __init__(
        self,
        data: Sharded,
        rank: int,
        node: str,
        shards: Shards,
        keeper: Prefetcher | None,
        attempt: int,
    ) -> None:
        self.shards = shards
        # Sends a record to the control plane, if there is one.
        self.send: Callable[[Message], None] | None = None
        self._data, self._rank, self._node, self._attempt = data, rank, node, attempt
        self._keeper = keeper
        # Of the current epoch.
        self._misses = Misses()
        self._waits = 0
        self._waited_s = 0.0

    def take(self, part: NodePart) -> None:
        """Pass a segment's part for this node to the keeper. Thread-safe."""
        if self._keeper is not None:
            self._keeper.take(part)

    def reads(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Count misses where batches are collated."""
        return dataset, options | {"collate_fn": Counting(dataset, options.get("collate_fn"))}

    def loading(self) -> None:
        """Discard misses from before the loading of batches.

        The DataLoader's processes inherit the counts. The script's body may have read from the data
        set, too.
        """
        self._data.take_misses()

    def loaded(self, batch: Loaded, data_s: float) -> Any:
        """Count a batch's misses and return it; the script waited `data_s` seconds for it."""
        misses = Misses(*batch.misses)
        self._misses += misses
        waited_s = min(data_s, misses.waited_s)
        if misses.samples and waited_s >= _WAIT_S:
            self._waits += 1
            self._waited_s += waited_s
        return batch.batch

    def left_epoch(self, epoch: int) -> None:
        """Record the epoch for the control plane."""
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

    def release(self) -> None:
        """End the keeper."""
        if self._keeper is not None:
            self._keeper.close()
