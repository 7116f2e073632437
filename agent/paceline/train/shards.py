"""A rank's part in data that lives on nodes: who shares a directory, and what is told of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.utils.data import default_collate

from paceline.core.errors import PacelineError
from paceline.data import Sharded
from paceline.data.keeper import Keeper, NodePart
from paceline.data.sharded import Misses
from paceline.train.environment import Environment
from paceline.train.meeting import Meeting, kernel
from paceline.wire import NOWHERE, DataEpoch, Message, Shards

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


def settle(dataset: Any, meeting: Meeting, environment: Environment) -> NodeData | None:
    """Finds out which ranks share a node, and what each node has; each rank calls it.

    Args:
        dataset: None comes back unless it is `Sharded`.
        meeting: what the ranks know of each other.
        environment: what the launcher told this rank.

    Raises:
        PacelineError, OSError: a node's directory cannot be used; on each rank.
        TypeError: the data set is `Sharded` on some ranks only.
        ValueError: limits or sizes are not those of the other ranks.
    """
    sharded = dataset if isinstance(dataset, Sharded) else None
    kinds = _gathered(meeting, sharded is not None)
    if sharded is None:
        if any(kinds):
            raise TypeError("dataset: on some ranks it is paceline.data.Sharded; give it to all")
        return None
    if not all(kinds):
        raise TypeError("dataset: on some ranks it is not paceline.data.Sharded; give it to all")
    words = _gathered(meeting, _place(sharded))
    _raise(words)
    places = [word["place"] for word in words]
    order = list(dict.fromkeys(places))
    nodes = [order.index(place) for place in places]
    first = places.index(places[meeting.rank]) == meeting.rank
    word: dict[str, Any] = {"limit": sharded.directory.limit_bytes}
    held: list[int] = []
    try:
        lengths = sharded.lengths
        if first:
            held = sharded.directory.claim(lengths)
            word["held"] = np.array(held, "<u4").tobytes()
        word["samples"] = len(lengths)
    except Exception as error:
        word["error"] = f"{type(error).__name__}: {error}"
    words = _gathered(meeting, word)
    try:
        _raise(words)
        shards = _shards(sharded, nodes, words)
    except Exception:
        sharded.directory.release()
        raise
    sharded.keeps = True
    keeper = Keeper(sharded, held, meeting.filler) if first else None
    names = environment.placed(meeting.world)
    node = names[meeting.rank] if names else f"{socket.gethostname()}:{sharded.directory.path}"
    return NodeData(sharded, meeting.rank, node, shards, keeper, environment.attempt)


def _place(data: Sharded) -> dict[str, Any]:
    """Names this rank's directory: ranks with the same one share it."""
    path = data.directory.path
    try:
        status = path.stat()
    except OSError as error:
        return {"error": f"directory {path}: {error.strerror}"}
    return {"place": f"{kernel()} {status.st_dev} {status.st_ino}"}


def _shards(data: Sharded, nodes: list[int], words: list[dict[str, Any]]) -> Shards:
    held = np.full(len(data), NOWHERE, "<u2")
    limits = [0] * (max(nodes) + 1)
    for rank in reversed(range(len(nodes))):  # the lowest node of those that have it counts
        word = words[rank]
        if word["samples"] != len(data):
            raise ValueError(f"source: {word['samples']} samples on rank {rank}, {len(data)} here")
        limits[nodes[rank]] = word["limit"]
        if "held" in word:
            held[np.frombuffer(word["held"], "<u4")] = nodes[rank]
    return Shards(nodes, limits, data.lengths.astype("<u4").tobytes(), held.tobytes())


def _gathered(meeting: Meeting, word: Any) -> list[Any]:
    if meeting.world == 1:
        return [word]
    words: list[Any] = [None] * meeting.world
    dist.all_gather_object(words, word)
    return words


def _raise(words: list[dict[str, Any]]) -> None:
    for rank, word in enumerate(words):
        if "error" in word:
            raise PacelineError(f"on rank {rank}: {word['error']}")
