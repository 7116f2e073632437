"""What ranks report: records for an emitter, and what arrives on the bus or in the spool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from paceline import wire
from paceline.node.spool import drain
from paceline.wire import Hello, Message, RoundBatch, RoundRecord, StepBatch, StepRecord

RUN = "r1"
ROUND: dict[str, Any] = {
    "number": 7,
    "world": 4,
    "contributors": 2,
    "staleness": [1, 2, 0],
    "dropped": 5,
    "waited_s": 0.02,
    "reduced_s": 0.003,
    "bytes": 4096,
    "copied_s": 0.001,
}


def step_record(seq: int) -> StepRecord:
    return StepRecord(0, 0, seq, seq, 0, 0, 1, 1.0, 0.0, 0.1, 0.0, 0.1, 0.0)


def round_record(seq: int) -> RoundRecord:
    return RoundRecord(attempt=0, rank=0, seq=seq, ended_at=1.0, segment=3, step=40, **ROUND)


def hello(samples: int) -> Hello:
    sizes = b"\0" * 8 * samples
    return Hello(0, 1, 4, 0, sizes, "samples", False, 1, 0, 0.0, "0", "2", "cpu")


def unpacked(fields: dict[bytes, bytes]) -> Message:
    run, message = wire.decode(fields)
    assert run == RUN
    return message


def on_bus(url: str) -> list[Message]:
    with redis.Redis.from_url(url) as client:
        return [unpacked(fields) for _, fields in client.xrange(wire.TELEMETRY)]


def in_spool(directory: Path) -> list[Message]:
    """All messages of the directory's chunks, which are gone afterwards."""
    messages: list[Message] = []
    drain(directory, lambda fields: messages.append(unpacked(fields)), include_open=True)
    return messages


def steps_of(messages: list[Message]) -> list[int]:
    return [r.seq for m in messages if isinstance(m, StepBatch) for r in m.records]


def rounds_of(messages: list[Message]) -> list[RoundRecord]:
    return [r for m in messages if isinstance(m, RoundBatch) for r in m.records]
