"""The worker has ranks ended that hold up a run, once an attempt, and only where that was asked."""

from __future__ import annotations

from typing import Any

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import EndRanks, LongPhase, Message, Phase, StepBatch, control, decode
from paceline_backend.control.hangs import HangWatch
from paceline_backend.store import Store, nodes, schema, telemetry
from support.groups import answer, orders
from support.records import add_run, hello, record

RUN = "r"


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy


def run(store: Store, **columns: Any) -> None:
    """A run that trains on node n1, of which rank 1 waits for its batch, and rank 0 for rank 1."""
    answer(store, "n1")
    given = {"state": "running", "node": "n1", "restart_hung_s": 60.0, "max_restarts": 3}
    add_run(store, RUN, **(given | columns))
    write(store, hello())


def write(store: Store, *messages: Message) -> None:
    telemetry.write(store, [(RUN, message) for message in messages])


def hang(store: Store, since_s: float, phase: Phase = Phase.DATA, attempt: int = 0) -> None:
    """What both ranks have been doing for so long."""
    waits = Phase.SYNC if phase is Phase.DATA else phase
    write(store, *(LongPhase(attempt, r, 3, (waits, phase)[r], since_s, 9.0) for r in range(2)))


class Clock:
    """A watch's clock, which a test sets."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def scan(watch: HangWatch) -> None:
    """Looks, and again when the run has stood still for long enough."""
    clock = watch._listened.clock
    assert isinstance(clock, Clock)
    watch.scan()
    for _ in range(8):
        clock.at += 2.0
        watch.scan()


def audited(store: Store) -> list[dict[str, Any]]:
    with store.read() as connection:
        query = sa.select(schema.audit.c.who, schema.audit.c.action, schema.audit.c.details)
        return [dict(row) for row in connection.execute(query).mappings()]


def on_control(bus: redis.Redis) -> list[Message]:
    entries: Any = bus.xrange(control(RUN))
    return [decode(fields)[1] for _, fields in entries]


def test_ranks_that_hold_up_a_run_are_ended(store: Store, bus_url: str, bus: redis.Redis) -> None:
    run(store)
    watch = HangWatch(store, bus_url, "me", clock=Clock())
    hang(store, 59.0)
    scan(watch)
    assert orders(bus, "n1") == []
    hang(store, 61.0)
    scan(watch)
    [order] = orders(bus, "n1")
    assert isinstance(order, EndRanks)
    assert (order.attempt, order.ranks) == (0, [1])
    assert "It waits for rank 1, which is waiting for a batch." in order.reason
    assert on_control(bus) == [order]  # for `paceline run`
    row = {"who": "the control plane", "action": "run.restart-hung"}
    assert audited(store) == [row | {"details": {"attempt": 0, "ranks": [1]}}]
    scan(watch)
    assert len(orders(bus, "n1")) == 1


def test_another_worker_repeats_the_order_but_not_the_record(
    store: Store, bus_url: str, bus: redis.Redis
) -> None:
    run(store)
    hang(store, 61.0)
    scan(HangWatch(store, bus_url, "me", clock=Clock()))
    scan(HangWatch(store, bus_url, "other", clock=Clock()))
    first, second = orders(bus, "n1")
    assert first == second
    assert len(audited(store)) == 1


def test_the_next_attempt_may_hang_too(store: Store, bus_url: str, bus: redis.Redis) -> None:
    run(store)
    watch = HangWatch(store, bus_url, "me", clock=Clock())
    hang(store, 61.0)
    scan(watch)
    write(store, hello(attempt=1))
    scan(watch)  # what was told of attempt 0 says nothing any more
    assert len(orders(bus, "n1")) == 1
    hang(store, 61.0, attempt=1)
    scan(watch)
    assert [order.attempt for order in orders(bus, "n1") if isinstance(order, EndRanks)] == [0, 1]


def test_where_all_wait_all_are_ended(store: Store, bus_url: str, bus: redis.Redis) -> None:
    run(store)
    hang(store, 61.0, Phase.SYNC)
    scan(HangWatch(store, bus_url, "me", clock=Clock()))
    [order] = orders(bus, "n1")
    assert isinstance(order, EndRanks)
    assert order.ranks == [0, 1]


@pytest.mark.parametrize(
    "columns", [{"restart_hung_s": None}, {"state": "stopped"}], ids=["not asked", "ended"]
)
def test_other_runs_are_left_alone(
    store: Store, bus_url: str, bus: redis.Redis, columns: dict[str, Any]
) -> None:
    run(store, **columns)
    hang(store, 3600.0)
    scan(HangWatch(store, bus_url, "me", clock=Clock()))
    assert orders(bus, "n1") == []


def test_a_bus_that_is_away_leaves_no_record(store: Store) -> None:
    run(store)
    hang(store, 61.0)
    with pytest.raises(redis.RedisError):
        scan(HangWatch(store, "redis://127.0.0.1:9", "me", clock=Clock()))
    assert audited(store) == []


def test_a_slow_rank_is_no_hang(store: Store, bus_url: str, bus: redis.Redis) -> None:
    """Its steps are too short to be told before their end, and the other rank waits for it."""
    run(store)
    clock = Clock()
    watch = HangWatch(store, bus_url, "me", clock=clock)
    write(store, LongPhase(0, 0, 30, Phase.SYNC, 600.0, 9.0))
    for step in range(3, 9):
        write(store, StepBatch([record(step, 1)]))
        for _ in range(5):
            watch.scan()
            clock.at += 2.0
    assert orders(bus, "n1") == []
    scan(watch)
    assert len(orders(bus, "n1")) == 1


def test_a_pause_of_the_server_confirms_no_hang(
    store: Store, bus_url: str, bus: redis.Redis
) -> None:
    """What the ranks did meanwhile may not be stored yet."""
    run(store)
    hang(store, 61.0)
    clock = Clock()
    watch = HangWatch(store, bus_url, "me", clock=clock)
    watch.scan()
    clock.at += 60.0
    watch.scan()
    assert orders(bus, "n1") == []


def test_an_evaluation_of_one_rank_is_no_hang(store: Store, bus_url: str, bus: redis.Redis) -> None:
    run(store)
    write(
        store,
        LongPhase(0, 0, 3, Phase.PLAN, 600.0, 9.0),
        LongPhase(0, 1, 3, Phase.SCRIPT, 600.0, 9.0),
    )
    scan(HangWatch(store, bus_url, "me", clock=Clock()))
    assert orders(bus, "n1") == []
