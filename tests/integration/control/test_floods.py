"""A writer that floods the bus is switched off, and let back; other writers notice nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from redis.client import Pipeline

from paceline.wire import writer_of
from paceline.wire.bus import connect
from paceline_backend.control.bus_users import look_for_floods
from paceline_backend.control.periodic import Periodic
from paceline_backend.control.silent_runs import SILENT_S
from paceline_backend.server import floods
from paceline_backend.server.floods import Bounds, Flood, Guard
from paceline_backend.store import Store, runs
from support.records import add_run
from support.waiting import DEADLINE_S, until
from support.web import serving

THIEF, OTHER = "paceline:run:thief:telemetry", "paceline:node:n.1:telemetry"
BOUNDS = Bounds(entries=100, bytes=2**30, off_s=3_600.0)
AT_ONCE = Bounds(entries=100, bytes=2**30, off_s=0.0)


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    """A bus with a user for each of two streams; it forgets them after the test."""
    users = [floods.user_of(stream) for stream in (THIEF, OTHER)]
    with connect(bus_url) as client:
        for user, stream in zip(users, (THIEF, OTHER), strict=True):
            rules = ("reset", "on", ">secret", "-@all", "+xadd", "+ping", "+hello", "+auth")
            acl(client, "SETUSER", user, *rules, "+client|setinfo", f"%W~{stream}")
        yield client
        acl(client, "DELUSER", *users, "poor")


def acl(client: redis.Redis, *arguments: str) -> Any:
    return client.execute_command("ACL", *arguments)  # type: ignore[no-untyped-call]


def writer(bus: redis.Redis, user: str) -> redis.Redis:
    """A connection of a user of the bus that is not tried again when it ends."""
    where = bus.connection_pool.connection_kwargs
    return redis.Redis(
        host=where["host"],
        port=where["port"],
        username=user,
        password="secret",
        retry=None,
    )


def look(guard: Guard, stream: str) -> Flood | None:
    return next((flood for flood in guard.look_at_all() if flood.stream == stream), None)


def write(client: redis.Redis, stream: str, count: int, size: int = 10) -> None:
    pipeline = client.pipeline(transaction=False)
    for _ in range(count):
        pipeline.xadd(stream, {"data": b"x" * size})
    pipeline.execute()


def test_users_are_named_after_streams() -> None:
    assert floods.user_of(THIEF) == "paceline-run-thief"
    assert floods.user_of(OTHER) == "paceline-node-n.1"
    assert writer_of("paceline:telemetry") == ("", "")


def test_within_its_bounds_a_writer_goes_on(bus: redis.Redis) -> None:
    with closing(writer(bus, floods.user_of(THIEF))) as thief:
        write(thief, THIEF, 100)
        guard = Guard(bus, BOUNDS)
        assert list(guard.streams()) == [THIEF]
        assert look(guard, THIEF) is None
        write(thief, THIEF, 1)
    assert bus.xlen(THIEF) == 101


def test_above_its_bounds_it_is_off_and_nothing_is_lost(bus: redis.Redis) -> None:
    """So slow a growth is a run whose telemetry waits, and that can spool the rest."""
    guard = Guard(bus, BOUNDS)
    with (
        closing(writer(bus, floods.user_of(THIEF))) as thief,
        closing(writer(bus, floods.user_of(OTHER))) as other,
    ):
        write(other, OTHER, 1)
        write(thief, THIEF, 150)
        flood = look(guard, THIEF)
        assert flood is not None
        assert (flood.run, flood.entries, flood.dropped, flood.off) == ("thief", 150, 0, True)
        with pytest.raises(redis.RedisError):  # its connection is gone
            write(thief, THIEF, 1)
        with pytest.raises(redis.AuthenticationError):
            write(thief, THIEF, 1)
        assert look(guard, OTHER) is None
        write(other, OTHER, 1)
    assert (bus.xlen(THIEF), bus.xlen(OTHER)) == (150, 2)
    assert floods.counts(bus) == floods.Counts(off_now=1, switched_off=1, dropped=0)


def test_a_look_at_all_streams_takes_as_many_round_trips_as_at_one(
    bus: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory is asked of streams alone that hold something."""
    sent: list[list[str]] = []
    execute = Pipeline.execute

    def noted(pipeline: Pipeline, *arguments: Any) -> Any:
        sent.append([str(command[0][0]) for command in pipeline.command_stack])
        return execute(pipeline, *arguments)

    for index in range(50):
        bus.xgroup_create(f"paceline:run:idle-{index}:telemetry", "group", mkstream=True)
    write(bus, OTHER, 1)
    write(bus, THIEF, 150)
    monkeypatch.setattr(Pipeline, "execute", noted)
    seen = Guard(bus, BOUNDS).look_at_all()
    assert [(flood.stream, flood.off) for flood in seen] == [(THIEF, True)]
    assert sent == [["XLEN"] * 52, ["MEMORY USAGE"] * 2]


def look_twice(guard: Guard, bus: redis.Redis, stream: str) -> Flood:
    """A second look, before which ingest stored an entry of the stream."""
    assert look(guard, stream) is not None
    stored: Any = bus.xrange(stream, count=1)
    bus.xdel(stream, stored[0][0])
    flood = look(guard, stream)
    assert flood is not None
    return flood


@pytest.mark.parametrize(
    ("bounds", "least"), [(BOUNDS, 100), (Bounds(10**9, 100_000, 3_600.0), 50)]
)
def test_a_flood_is_trimmed_to_the_bounds(bus: redis.Redis, bounds: Bounds, least: int) -> None:
    with closing(writer(bus, floods.user_of(THIEF))) as thief:
        write(thief, THIEF, 1_000, size=1_000)
    flood = look_twice(Guard(bus, bounds), bus, THIEF)
    assert flood.dropped == 999 - bus.xlen(THIEF)
    assert least <= bus.xlen(THIEF) <= 100
    assert floods.counts(bus).dropped == flood.dropped


def test_what_nobody_stores_is_not_dropped(bus: redis.Redis) -> None:
    """A healthy run's stream gets as long while the database is away."""
    write(bus, THIEF, 1_000)
    guard = Guard(bus, BOUNDS)
    for _ in range(3):
        flood = look(guard, THIEF)
        assert flood is not None
        assert (flood.entries, flood.dropped) == (1_000, 0)


def test_what_a_node_sent_is_not_dropped(bus: redis.Redis) -> None:
    """Its agent has deleted the spool."""
    write(bus, OTHER, 1_000)
    assert look_twice(Guard(bus, BOUNDS), bus, OTHER).dropped == 0
    assert bus.xlen(OTHER) == 999


@pytest.mark.parametrize("stream", [THIEF, "paceline:run:nobody:telemetry"])
def test_a_flood_is_news_once(bus: redis.Redis, stream: str) -> None:
    """Also on a bus without users."""
    guard = Guard(bus, BOUNDS)

    def news() -> bool | None:
        flood = look(guard, stream)
        return None if flood is None else flood.news

    write(bus, stream, 101)
    assert [news(), news(), news()] == [True, False, False]
    bus.delete(stream)
    assert news() is None
    bus.delete(floods.OFF)  # let back
    write(bus, stream, 101)
    assert [news(), news()] == [True, False]


def test_a_silent_writer_is_let_back_before_its_run_counts_as_lost() -> None:
    assert Bounds().off_s < SILENT_S / 2


def test_it_is_let_back_when_its_time_is_over_and_its_stream_has_drained(bus: redis.Redis) -> None:
    write(bus, THIEF, 101)
    assert look(Guard(bus, BOUNDS), THIEF) is not None
    bus.delete(THIEF)
    assert Guard(bus, BOUNDS).switch_on() == [], "its time is not over"
    write(bus, THIEF, 101)
    assert look(Guard(bus, AT_ONCE), THIEF) is not None
    assert Guard(bus, AT_ONCE).switch_on() == [], "its stream is full"
    bus.xtrim(THIEF, maxlen=50, approximate=False)
    assert Guard(bus, AT_ONCE).switch_on() == ["paceline-run-thief"]
    with closing(writer(bus, "paceline-run-thief")) as thief:
        write(thief, THIEF, 1)
    counted = floods.counts(bus)
    assert (counted.off_now, counted.switched_off) == (0, 1), "it stayed off: once"


def test_no_user_is_made_of_a_name(bus: redis.Redis) -> None:
    """The bus makes a user of any name that is switched off or on."""
    stream = "paceline:run:nobody:telemetry"
    write(bus, stream, 300)
    flood = look_twice(Guard(bus, AT_ONCE), bus, stream)
    assert (flood.off, flood.dropped) == (False, 299 - bus.xlen(stream))
    assert bus.xlen(stream) <= 100
    write(bus, THIEF, 101)
    assert look(Guard(bus, AT_ONCE), THIEF) is not None
    acl(bus, "DELUSER", "paceline-run-thief")  # as when the bus was restarted
    bus.delete(THIEF)
    Guard(bus, AT_ONCE).switch_on()
    assert not {b"paceline-run-nobody", b"paceline-run-thief"} & set(acl(bus, "USERS"))


def test_a_bus_that_gives_no_such_right_is_trimmed_alone(
    bus: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    acl(bus, "SETUSER", "poor", "reset", "on", ">secret", "+@all", "-acl", "~*")
    with closing(writer(bus, "poor")) as client:
        guard = Guard(client, BOUNDS)
        for _ in range(2):
            write(bus, THIEF, 1_000)
            assert not look_twice(guard, bus, THIEF).off
            assert bus.xlen(THIEF) == 100
        assert guard.switch_on() == []
    assert sum("may not switch the bus user" in message for message in caplog.messages) == 1


def test_a_worker_bounds_a_thief_and_says_so(
    bus: redis.Redis,
    bus_url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop = threading.Event()
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as store:
        add_run(store, "thief", state="running")
        guard = Periodic("flood guard", 0.01, partial(look_for_floods, store, Guard(bus, BOUNDS)))
        worker = threading.Thread(target=guard.run, args=[stop])
        worker.start()
        try:
            with (
                closing(writer(bus, "paceline-run-thief")) as thief,
                pytest.raises(redis.RedisError),
            ):
                while True:  # until it may not
                    write(thief, THIEF, 50)
            until(lambda: runs.get(store, "thief")["message"], "it is told")
            with serving(store, bus_url) as client:
                figures = _figures(client)
        finally:
            stop.set()
            worker.join(timeout=DEADLINE_S)
        assert not worker.is_alive()
        assert runs.get(store, "thief")["message"].startswith("its telemetry flooded the bus: ")
    assert "paceline-run-thief floods the bus" in caplog.text
    assert (figures["paceline_writers_off"], figures["paceline_floods_total"]) == ("1.0", "1.0")


def _figures(client: httpx.Client) -> dict[str, str]:
    lines = client.get("/metrics").text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
