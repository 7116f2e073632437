"""A rank's access to data that is stored on nodes.

At a session's start, `settle` returns the rank's `NodeData`, which passes the node's shards of the
plan to the prefetcher, counts the samples of batches that were not on the node (misses), and sends
a record of each epoch to the control plane.
"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import default_collate

from paceline.core.errors import PacelineError
from paceline.data import Sharded
from paceline.data.prefetcher import NodeShard, Prefetcher
from paceline.data.sharded import Misses
from paceline.train.environment import Environment
from paceline.train.feature import Feature
from paceline.train.startup import Startup, gathered, kernel
from paceline.wire import NOWHERE, DataEpoch, Message, Shards

# Minimum duration in seconds of a wait for reads from the source, for the wait to be counted.
_LEAST_WAIT_S = 1e-3
_LONGEST_NODE_NAME = 200


class Loaded(NamedTuple):
    """A batch, and the counts of its misses: the samples that were not on the node.

    `misses` has the fields of `Misses`: number of samples, bytes, and seconds of waiting.
    """

    batch: Any
    misses: tuple[int, int, float]


class Counting:
    """A collate function that also returns the batch's misses: samples that were not on the node.

    The misses counted since the previous call are those of this batch, because a process loads and
    collates its batches one after the other.
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
    """A rank's data on its node. The prefetcher runs in the first rank of each node."""

    def __init__(
        self,
        data: Sharded,
        rank: int,
        node: str,
        shards: Shards,
        prefetcher: Prefetcher | None,
        attempt: int,
    ) -> None:
        self.shards = shards
        # Function that sends a record to the control plane; None without a control plane.
        self.send: Callable[[Message], None] | None = None
        self._data, self._rank, self._node, self._attempt = data, rank, node, attempt
        self._prefetcher = prefetcher
        self._misses = Misses()
        self._waits = 0
        self._waited_s = 0.0

    def take(self, shard: NodeShard) -> None:
        """Pass a segment's shard for this node to the prefetcher. Thread-safe."""
        if self._prefetcher is not None:
            self._prefetcher.take(shard)

    def reads(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Make the DataLoader count misses, in its collate function; see `Misses`."""
        return dataset, options | {"collate_fn": Counting(dataset, options.get("collate_fn"))}

    def loading(self) -> None:
        """Discard misses that were counted before batches are loaded.

        The DataLoader's processes inherit this process's counts, and the loop's body may have read
        from the data set, too.
        """
        self._data.take_misses()

    def loaded(self, batch: Loaded, data_s: float) -> Any:
        """Count a batch's misses and return the batch; the script waited `data_s` s for it."""
        misses = Misses(*batch.misses)
        self._misses += misses
        waited_s = min(data_s, misses.waited_s)
        if misses.samples and waited_s >= _LEAST_WAIT_S:
            self._waits += 1
            self._waited_s += waited_s
        return batch.batch

    def left_epoch(self, epoch: int) -> None:
        """Report the numbers of samples that were prefetched and that were read from the source."""
        prefetcher, misses = self._prefetcher, self._misses
        moved = prefetcher.moved(epoch) if prefetcher is not None else None
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
        """End the prefetcher."""
        if self._prefetcher is not None:
            self._prefetcher.close()


def settle(dataset: Any, startup: Startup, environment: Environment) -> NodeData | None:
    """Find out which ranks share a node, and which samples each node has. All ranks call this.

    Return None, on all ranks, unless the data set is `Sharded`.

    Raises:
        PacelineError, OSError: a node's directory cannot be used; raised on each rank.
        ValueError: limits or sizes differ between ranks.
    """
    if not isinstance(dataset, Sharded):
        return None
    words = gathered(startup.world, _place(dataset))
    _raise(words)
    places = [word["place"] for word in words]
    order = list(dict.fromkeys(places))
    nodes = [order.index(place) for place in places]
    first = places.index(places[startup.rank]) == startup.rank
    word: dict[str, Any] = {"limit": dataset.directory.limit_bytes}
    held: list[int] = []
    try:
        lengths = dataset.lengths
        if first:
            held = dataset.directory.claim(lengths)
            word["held"] = np.array(held, "<u4").tobytes()
        word["samples"] = len(lengths)
        word["lengths"] = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()
    except Exception as error:
        word["error"] = f"{type(error).__name__}: {error}"
    words = gathered(startup.world, word)
    try:
        _raise(words)
        _check(nodes, words)
        shards = _shards(dataset, nodes, words)
    except Exception:
        dataset.directory.release()
        raise
    dataset.keeps = True
    prefetcher = Prefetcher(dataset, held, startup.filler) if first else None
    names = environment.placed(startup.world)
    node = names[startup.rank] if names else f"{socket.gethostname()}:{dataset.directory.path}"
    node = node[:_LONGEST_NODE_NAME]
    return NodeData(dataset, startup.rank, node, shards, prefetcher, environment.attempt)


def _place(data: Sharded) -> dict[str, Any]:
    """Return an ID of this rank's directory, or an error; equal IDs mean the same directory."""
    path = data.directory.path
    try:
        status = path.stat()
    except OSError as error:
        return {"error": f"directory {path}: {error.strerror}"}
    return {"place": f"{kernel()} {status.st_dev} {status.st_ino}"}


def _check(nodes: list[int], words: list[dict[str, Any]]) -> None:
    """Raise a ValueError if ranks' data differ, or the limits of ranks that share a directory.

    The error is the same on each rank.
    """
    for rank, word in enumerate(words):
        first = nodes.index(nodes[rank])
        if word["samples"] != words[0]["samples"]:
            raise ValueError(
                f"source: {word['samples']} samples on rank {rank} but {words[0]['samples']} on "
                "rank 0: give Sharded the same source on every rank"
            )
        if word["lengths"] != words[0]["lengths"]:
            raise ValueError(
                f"source: the sizes of samples on rank {rank} differ from those on rank 0: give "
                "Sharded the same source on every rank"
            )
        if word["limit"] != words[first]["limit"]:
            raise ValueError(
                f"limit_bytes={word['limit']} on rank {rank} but {words[first]['limit']} on rank "
                f"{first}, and both keep samples in the same directory: give them the same limit "
                "or separate directories"
            )


def _shards(data: Sharded, nodes: list[int], words: list[dict[str, Any]]) -> Shards:
    held = np.full(len(data), NOWHERE, "<u2")
    limits = [0] * (max(nodes) + 1)
    # If several nodes have a sample, record the lowest node: in reverse order, it is written last.
    for rank in reversed(range(len(nodes))):
        word = words[rank]
        limits[nodes[rank]] = word["limit"]
        if "held" in word:
            held[np.frombuffer(word["held"], "<u4")] = nodes[rank]
    return Shards(nodes, limits, data.lengths.astype("<u4").tobytes(), held.tobytes())


def _raise(words: list[dict[str, Any]]) -> None:
    for rank, word in enumerate(words):
        if "error" in word:
            raise PacelineError(f"on rank {rank}: {word['error']}")
