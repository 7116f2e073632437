"""What moved to nodes for an epoch: from ranks' words to REST."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.wire import DataEpoch, Hello, Message, Shards
from paceline_backend.control.checks import Checks
from paceline_backend.store import Store, StoreRefusedError, telemetry
from paceline_backend.store.details import epochs
from support.records import add_run, hello
from support.sharded import shards
from support.web import serving

LENGTHS = np.full(32, 7)


def write(store: Store, *messages: Message) -> None:
    telemetry.write(store, [("r", message) for message in messages])


def epoch_of(rank: int, epoch: int, node: str, **changes: Any) -> DataEpoch:
    values: dict[str, Any] = {
        "attempt": 0,
        "planned_bytes": 0,
        "moved_bytes": 0,
        "moved": 0,
        "moved_s": 0.0,
        "read_bytes": 100,
        "read": 2,
        "waits": 1,
        "waited_s": 0.25,
        "held_bytes": 0,
        "at": 50.0 + rank,
        **changes,
    }
    return DataEpoch(rank=rank, epoch=epoch, node=node, **values)


def test_rows_are_sums_over_the_ranks_of_a_node(store: Store) -> None:
    run = add_run(store, "r", nproc=3)
    keeper = {"planned_bytes": 50, "moved_bytes": 40, "moved": 4, "moved_s": 2.5, "held_bytes": 900}
    write(store, hello(3), epoch_of(1, 0, "a"), epoch_of(0, 0, "a", **keeper), epoch_of(2, 0, "b"))
    write(store, epoch_of(0, 1, "a", waits=0, waited_s=0.0, read=0, read_bytes=0))
    write(store, epoch_of(0, 0, "a", **keeper))  # once more
    with store.read() as connection:
        rows = epochs.data_moved(connection, run, 100)
        assert epochs.data_moved(connection, run, 1) == rows[-1:]
    assert [(row["epoch"], row["node"]) for row in rows] == [(0, "a"), (0, "b"), (1, "a")]
    first = {"attempt": 0, "epoch": 0, "node": "a", **keeper}
    first |= {"read_bytes": 200, "read": 4, "waits": 2, "waited_s": 0.5, "at": 51.0}
    assert rows[0] == first


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"rank": -1}, "rank is -1"),
    ({"epoch": 2**31}, "epoch is"),
    ({"moved_s": float("nan")}, "moved_s is nan"),
    ({"waits": -1}, "waits is -1"),
    ({"held_bytes": 2**63}, "held_bytes is"),
    ({"node": ""}, "node has 0 characters"),
    ({"node": "\ud800"}, "UTF-8 cannot encode"),
]


def test_what_no_database_takes_is_refused(store: Store) -> None:
    add_run(store, "r")
    write(store, hello())
    for changes, reason in IMPOSSIBLE:
        message = msgspec.structs.replace(epoch_of(0, 0, "a"), **changes)
        with pytest.raises(StoreRefusedError, match=reason):
            write(store, message)
        [refused] = Checks(store).reasons([("r", message)])
        assert refused is not None and reason in refused


def test_a_rank_that_the_run_does_not_have_is_refused(store: Store) -> None:
    add_run(store, "r")
    write(store, hello())
    [reason] = Checks(store).reasons([("r", epoch_of(2, 0, "a"))])
    assert reason is not None and "rank 2 is out of range" in reason


def sharded(**changes: Any) -> Hello:
    return hello(shards=msgspec.structs.replace(shards((0, 1), (9, 9), LENGTHS), **changes))


SHARDS: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"nodes": [0]}, "shards.nodes has 1 entries for 2 ranks"),
    ({"nodes": [0, 2]}, "shards.nodes does not number the 2 nodes"),
    ({"limits": [9, 0]}, "shards.limits holds a number"),
    ({"lengths": b"1234"}, "do not have 32 samples"),
    ({"held": b"\2\0" * 32}, "shards.held names a node beyond the 2"),
]


def test_shards_that_do_not_fit_the_run_are_refused(store: Store) -> None:
    add_run(store, "r")
    for changes, reason in SHARDS:
        [refused] = Checks(store).reasons([("r", sharded(**changes))])
        assert refused is None if reason is None else reason in str(refused)
    assert isinstance(sharded().shards, Shards)


def test_rest_shows_them(store: Store, bus_url: str) -> None:
    add_run(store, "r")
    write(store, hello(), epoch_of(0, 0, "a"), epoch_of(1, 0, "b"))
    with serving(store, bus_url) as client:
        answer = client.get("/api/v1/runs/r/data").json()
        assert [(row["node"], row["read_bytes"]) for row in answer] == [("a", 100), ("b", 100)]
        assert len(client.get("/api/v1/runs/r/data?limit=1").json()) == 1
        assert client.get("/api/v1/runs/r/data?limit=0").status_code == 422
        assert client.get("/api/v1/runs/nobody/data").status_code == 404
