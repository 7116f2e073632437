"""A rank's shards of the plan, fetched by a thread before the rank asks for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistError, DistStoreError, HashStore, TCPStore

from paceline.train.plan.follower import Fetcher
from paceline.train.plan_shard import PlanShard, put_shard, shard_key
from support.waiting import until

RANK = 1


def shard(segment: int, epoch: int = 0, *, epoch_end: bool = False) -> PlanShard:
    return PlanShard(epoch, segment, segment, [1], [1.0], [1.0], [], b"\0\0\0\0", epoch_end)


@contextmanager
def fetcher(store: Any) -> Iterator[Fetcher]:
    made = Fetcher(store, RANK)
    made.enter(0)
    yield made
    made.close()
    until(lambda: "paceline-plan" not in names(), "its thread to end")


def names() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_parts_come_in_order_and_leave_the_store() -> None:
    store = HashStore()
    with fetcher(store) as fetching:
        for segment in range(3):
            put_shard(store, segment, RANK, shard(segment))
        until(
            lambda: not store.check([shard_key(2, RANK)]),
            "all shards fetched before they are asked",
        )
        assert [fetching.next() for _ in range(3)] == [shard(segment) for segment in range(3)]


def test_the_next_epoch_waits_for_the_rank() -> None:
    store = HashStore()
    last, first = shard(0, epoch_end=True), shard(1, 1)
    put_shard(store, 0, RANK, last)
    put_shard(store, 1, RANK, first)
    with fetcher(store) as fetching:
        assert fetching.next() == last
        until(lambda: not store.check([shard_key(0, RANK)]), "the epoch's last shard deleted")
        assert store.check([shard_key(1, RANK)])
        fetching.enter(1)
        assert fetching.next() == first


def test_a_rank_that_is_busy_for_long_loses_nothing() -> None:
    """The thread's calls time out meanwhile."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    calls = []

    class Counting:
        timeout = store.timeout
        set = store.set

        def clone(self) -> Counting:
            return self

        def get(self, key: str) -> bytes:
            calls.append(key)
            return store.get(key)

        def delete_key(self, key: str) -> bool:
            return store.delete_key(key)

    with fetcher(Counting()) as fetching:
        until(lambda: len(calls) > 2, "calls that timed out")
        put_shard(store, 0, RANK, shard(0))
        assert fetching.next() == shard(0)


def test_nothing_stored_for_long_is_an_error() -> None:
    store = HashStore()
    store.set_timeout(timedelta(seconds=0.2))
    with fetcher(store) as fetching, pytest.raises(DistStoreError, match="stored no plan"):
        fetching.next()


def test_a_store_that_ended_is_an_error_each_time() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, is_master=False)
    with fetcher(client) as fetching:
        put_shard(server, 0, RANK, shard(0))
        assert fetching.next() == shard(0)
        del server
        for _ in range(2):
            with pytest.raises(DistError):
                fetching.next()
