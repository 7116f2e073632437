"""What a broadcast simulation makes of messages that nobody can read."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from paceline.wire import Plan, Proposal, StopTraining, encode
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.simulator.broadcast import Broadcast

SCENARIO: dict[str, Any] = {
    "name": "small",
    "workers": 2,
    "global_batch": 8,
    "epochs": 1,
    "sizes": {"distribution": "lognormal", "mean": 45, "dif": 30, "samples": 80},
    "devices": {"unit_s": 1e-3},
    "policy": "bsp",
}


class Bus:
    def __init__(self, entries: list[dict[bytes, bytes]]) -> None:
        self._entries = [(b"%d-0" % k, fields) for k, fields in enumerate(entries, start=1)]

    def xread(self, positions: dict[str, str]) -> list[Any]:
        ((stream, _),) = positions.items()
        entries, self._entries = self._entries, []
        return [(stream.encode(), entries)] if entries else []

    def xadd(self, stream: str, fields: dict[bytes, bytes]) -> None: ...

    def xlen(self, stream: str) -> int:
        return 0


class Server:
    def call(
        self, method: str, path: str, body: Any = None, if_match: str | None = None
    ) -> dict[str, Any]:
        return {"state": "running", "version": 0}


def unreadable() -> dict[bytes, bytes]:
    """A proposal whose synchroniser does not take its parameters."""
    simulation = Simulation.of(Scenario.of({**SCENARIO, "policy": "local-sgd"}))
    segment: Plan = simulation.advance().plan
    fields = encode(Proposal(0, segment, "a controller"), "run")
    body = msgspec.msgpack.decode(fields[b"data"])
    text = msgspec.msgpack.encode(body)
    spoilt = text.replace(b"every", b"evary")
    assert spoilt != text
    return {**fields, b"data": spoilt}


def test_an_unreadable_message_is_left_out_as_a_controller_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = [unreadable(), encode(StopTraining("enough", 0), "run")]
    bus: Any = Bus(entries)
    server: Any = Server()
    simulation = Simulation.of(Scenario.of(SCENARIO))
    broadcast = Broadcast(simulation, "run", bus, server, 0.0)
    with caplog.at_level(logging.WARNING):
        assert list(broadcast.segments()) == []
    assert broadcast.state == "stopped", "the next message counts"
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("an unreadable message is ignored: not a paceline message")
