"""A spool is delivered whole, and slowly enough for the bus and for what else its agent does."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from paceline.node import delivery as delivering
from paceline.node.delivery import Delivery
from paceline.node.rundir import Record
from paceline.node.spool import Spool
from paceline.wire import TELEMETRY, State, StopTraining, decode, encode
from support.node import link_to

MOST = 10


@pytest.fixture
def delivery(bus_url: str, tmp_path: Path) -> Iterator[Delivery]:
    with link_to(bus_url) as link:
        made = Delivery(tmp_path / "r", Record("r", "here", "the agent", ""), link)
        made.report(State.RUNNING)
        yield made
        made.close()


def numbered(number: int) -> StopTraining:
    return StopTraining("", number)


def spool(directory: Path, count: int, chunks: int = 1, run: str = "r") -> None:
    """Spools so many entries, numbered, in so many chunks."""
    for chunk in range(chunks):
        out = Spool(directory, "rank0", 1 << 20)
        for number in range(chunk * count // chunks, (chunk + 1) * count // chunks):
            assert out.append(encode(numbered(number), run))
        out.close()


def taken(bus: redis.Redis) -> list[int | str]:
    """Takes all entries from the bus, as ingest does: numbers of those spooled, names of states."""
    entries: Any = bus.xrange(TELEMETRY)
    if entries:
        bus.xdel(TELEMETRY, *(number for number, _ in entries))
    messages = [decode(fields)[1] for _, fields in entries]
    return [m.first_attempt if isinstance(m, StopTraining) else str(m.state) for m in messages]  # type: ignore[union-attr]


def test_no_more_waits_than_the_bus_may_hold(
    bus: redis.Redis, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane cuts off whoever floods the bus; here it stores nothing for a while."""
    monkeypatch.setattr(delivering, "_MOST_WAITING", MOST)
    monkeypatch.setattr(delivering, "_DELIVERY_INTERVAL_S", 0.0)
    spool(delivery.directory / "spool", 50, chunks=10)
    delivery.report(State.FINISHED)
    for _ in range(10):
        delivery.pump()
    assert MOST < bus.xlen(TELEMETRY) <= MOST + 5
    came: list[int | str] = []
    while not delivery.settled:
        new = taken(bus)
        came += new
        assert len(new) <= MOST + 6
        delivery.pump()
    came += taken(bus)
    assert came == ["running", *range(50), "finished"], "the end comes last"


def test_a_spool_is_delivered_bit_by_bit(
    bus: redis.Redis, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the agent looks after other runs, and says that it lives."""
    monkeypatch.setattr(delivering, "_DRAIN_S", 0.0)
    spool(delivery.directory / "spool", 6, chunks=3)
    delivery.report(State.FINISHED)
    came = [taken(bus)]
    while not delivery.settled:
        delivery.pump()
        came.append(taken(bus))
    assert came == [["running", 0, 1], [2, 3], [4, 5], ["finished"]]


def test_the_spool_of_a_run_speaks_for_no_other(
    bus: redis.Redis, delivery: Delivery, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent may report about all runs of its node, the script may not."""
    directory = delivery.directory / "spool"
    for run, messages in {"other": 2, "": 1, "r": 1}.items():
        spool(directory, messages, run=run)
    out = Spool(directory, "rank1", 1 << 20)
    out.append({b"data": b"whose?"})
    out.close()
    delivery.report(State.FINISHED)
    entries: Any = bus.xrange(TELEMETRY)
    assert {fields[b"run"] for _, fields in entries} == {b"r"}
    assert taken(bus) == ["running", 0, "finished"]
    assert caplog.text.count("ignoring records of other runs") == 1


def test_what_is_no_entry_ends_its_chunk_alone(bus: redis.Redis, delivery: Delivery) -> None:
    directory = delivery.directory / "spool"
    directory.mkdir()
    body = b"\xc1"
    record = struct.pack("<II", len(body), zlib.crc32(body)) + body
    (directory / "0.rank0.spool").write_bytes(record)
    spool(directory, 1)
    delivery.report(State.FINISHED)
    assert taken(bus) == ["running", 0, "finished"]


def test_what_was_sent_is_not_sent_again_when_the_run_ends(
    bus: redis.Redis, delivery: Delivery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither are chunks left out that were open until then."""
    monkeypatch.setattr(delivering, "_DRAIN_S", 0.0)
    monkeypatch.setattr(delivering, "_DELIVERY_INTERVAL_S", 0.0)
    directory = delivery.directory / "spool"
    spool(directory, 4, chunks=2)
    still_open = Spool(directory, "rank1", 1 << 20)
    still_open.append(encode(numbered(4), "r"))
    delivery.pump()
    delivery.report(State.FINISHED)
    while not delivery.settled:
        delivery.pump()
    assert taken(bus) == ["running", 0, 1, 2, 3, 4, "finished"]
    still_open.close()
