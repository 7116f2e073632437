"""A disk that is full for a while costs no record: they wait in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from paceline.node.spool import Spool
from paceline.train import sink
from paceline.train.report import Emitter
from paceline.train.sink import Sink
from paceline.wire import Hello, Message
from paceline_backend.server.embedded import EmbeddedBus
from support.disks import SmallDisk
from support.reports import RUN, hello, in_spool, on_bus, step_record, steps_of
from support.waiting import until

WAIT = "keeping it in memory"


@pytest.fixture
def bus(small_disk: SmallDisk) -> Iterator[EmbeddedBus]:
    """It keeps its file on the disk that is to be full."""
    with EmbeddedBus(small_disk.path / "bus") as server:
        yield server


@pytest.fixture
def spool(small_disk: SmallDisk) -> Spool:
    return Spool(small_disk.path / "spool", "rank0", 1 << 20)


def refuses(url: str) -> bool:
    with redis.Redis.from_url(url) as client:
        try:
            client.set("any", "thing")
        except redis.ResponseError:
            return True
    return False


def delivered(url: str, disk: SmallDisk) -> list[Message]:
    return on_bus(url) + in_spool(disk.path / "spool")


def test_records_wait_in_memory_for_bus_and_spool(
    bus: EmbeddedBus, spool: Spool, small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    emitter = Emitter(Sink(RUN, bus.url, spool), lambda: 0)
    emitter.record(step_record(0))
    until(lambda: steps_of(on_bus(bus.url)) == [0])
    small_disk.fill()
    until(lambda: refuses(bus.url), "a bus that can write no more")
    emitter.send(hello(4))
    for seq in range(1, 400):
        emitter.record(step_record(seq))
    until(lambda: WAIT in caplog.text)
    until(lambda: not emitter._queue)
    small_disk.empty()
    until(lambda: not refuses(bus.url), "the bus writes again")
    emitter.record(step_record(400))
    until(lambda: "is left in memory" in caplog.text)
    emitter.close()
    messages = delivered(bus.url, small_disk)
    assert sorted(set(steps_of(messages))) == list(range(401))
    assert sum(isinstance(message, Hello) for message in messages) == 1
    assert emitter.dropped == 0
    assert caplog.text.count(WAIT) == 1


def test_memory_spools_when_the_disk_has_room_but_the_bus_is_away(
    bus: EmbeddedBus, spool: Spool, small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    bus.kill()
    small_disk.fill()
    emitter = Emitter(Sink(RUN, bus.url, spool), lambda: 0)
    emitter.send(hello(4))
    for seq in range(100):
        emitter.record(step_record(seq))
    until(lambda: WAIT in caplog.text)
    small_disk.empty()
    until(lambda: "is left in memory" in caplog.text)
    emitter.close()
    messages = in_spool(small_disk.path / "spool")
    assert steps_of(messages) == list(range(100))
    assert sum(isinstance(message, Hello) for message in messages) == 1
    assert emitter.dropped == 0


def test_memory_is_bounded_and_the_rest_is_counted(
    spool: Spool,
    small_disk: SmallDisk,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sink, "HELD_BYTES", 5_000)
    monkeypatch.setattr("paceline.train.report.BATCH_LIMIT", 10)
    small_disk.fill()
    emitter = Emitter(Sink(RUN, None, spool), lambda: 0)
    for seq in range(1_000):
        emitter.record(step_record(seq))
    until(lambda: emitter.dropped > 0)
    until(lambda: not emitter._queue)
    small_disk.empty()
    until(lambda: "is left in memory" in caplog.text)
    emitter.close()
    kept = steps_of(in_spool(small_disk.path / "spool"))
    assert 0 < len(kept) == 1_000 - emitter.dropped
    assert "records are lost" in caplog.text


def test_what_the_disk_does_not_take_to_the_end_is_counted(
    spool: Spool, small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    small_disk.fill()
    emitter = Emitter(Sink(RUN, None, spool), lambda: 0)
    emitter.record(step_record(0))
    emitter.close()
    assert emitter.dropped == 1
    assert "1 telemetry records are lost" in caplog.text
