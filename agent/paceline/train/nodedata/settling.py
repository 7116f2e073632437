"""Finds out at a session's start which ranks share a node's directory, and what nodes have."""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import numpy as np

from paceline.core.errors import PacelineError
from paceline.data import Sharded
from paceline.data.keeper import Prefetcher
from paceline.train.environment import Environment
from paceline.train.meeting import Meeting, gathered, kernel
from paceline.train.nodedata.node import NodeData
from paceline.wire import NOWHERE, Shards

# Characters of a node's name, if no launcher gives one.
_LONGEST_NAME = 200


def settle(dataset: Any, meeting: Meeting, environment: Environment) -> NodeData | None:
    """Find out which ranks share a node, and which samples each node has. Collective.

    The result is None unless the data set is `Sharded`, on all ranks.

    Raises:
        PacelineError, OSError: a node's directory cannot be used; raised on each rank.
        ValueError: limits or sizes are not those of the other ranks.
    """
    if not isinstance(dataset, Sharded):
        return None
    words = gathered(meeting.world, _place(dataset))
    _raise(words)
    places = [word["place"] for word in words]
    order = list(dict.fromkeys(places))
    nodes = [order.index(place) for place in places]
    first = places.index(places[meeting.rank]) == meeting.rank
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
    words = gathered(meeting.world, word)
    try:
        _raise(words)
        _check(nodes, words)
        shards = _shards(dataset, nodes, words)
    except Exception:
        dataset.directory.release()
        raise
    dataset.keeps = True
    keeper = Prefetcher(dataset, held, meeting.filler) if first else None
    names = environment.placed(meeting.world)
    node = names[meeting.rank] if names else f"{socket.gethostname()}:{dataset.directory.path}"
    node = node[:_LONGEST_NAME]
    return NodeData(dataset, meeting.rank, node, shards, keeper, environment.attempt)


def _place(data: Sharded) -> dict[str, Any]:
    """Identify this rank's directory: ranks with the same one share it."""
    path = data.directory.path
    try:
        status = path.stat()
    except OSError as error:
        return {"error": f"directory {path}: {error.strerror}"}
    return {"place": f"{kernel()} {status.st_dev} {status.st_ino}"}


def _check(nodes: list[int], words: list[dict[str, Any]]) -> None:
    """Raise the same error on each rank unless all have the same data, and a node one limit."""
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
    # Reversed, so that the lowest of the nodes that have a sample counts.
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
