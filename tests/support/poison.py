"""Bad messages, by name: what any program may put on the bus by mistake or on purpose.

Raw MessagePack, so that they hold what the types of `paceline.wire` have no way to say.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from paceline.wire import (
    MOST_WHY,
    Fallback,
    Message,
    NodeState,
    Proposal,
    RunState,
    State,
)
from support.records import a_round, adopted, hello, record

Fields = dict[bytes, bytes]

NAN, INF = math.nan, math.inf
DEEP = 5_000


class Raw:
    """MessagePack that stands for itself in a value."""

    def __init__(self, data: bytes) -> None:
        self.data = data


def pack(value: Any) -> bytes:
    """MessagePack of builtins with `Raw` parts, of maps with any keys."""
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, Mapping):
        parts = [pack(part) for item in value.items() for part in item]
        return b"\xdf" + len(value).to_bytes(4, "big") + b"".join(parts)
    if isinstance(value, list | tuple):
        return b"\xdd" + len(value).to_bytes(4, "big") + b"".join(map(pack, value))
    return msgspec.msgpack.encode(value)


EXTENSION = Raw(b"\xd4\x05\x00")
SURROGATE = Raw(b"\xa3\xed\xa0\x80")  # U+D800, encoded as if it were a character
NESTED = Raw(b"\x91" * DEEP + b"\xc0")
NESTED_MAPS = Raw(b"\x81\xa1a" * DEEP + b"\xc0")
NESTED_LESS = Raw(b"\x91" * 200 + b"\xc0")
ENDLESS = Raw(b"\xdd\xff\xff\xff\xff")  # a list of 2³² items, of which none follows


def builtins(message: Message) -> dict[str, Any]:
    """A message as the map that it is on the bus, to be changed and packed."""
    made: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    return made


def fields(data: bytes, run: bytes = b"r", version: bytes = b"1") -> Fields:
    return {b"v": version, b"run": run, b"data": data}


def changed(message: Message, /, **values: Any) -> bytes:
    """A message with other values."""
    return pack({**builtins(message), **values})


def in_segment(message: Any, /, **values: Any) -> bytes:
    """An `Adopted` or a `Proposal` with other values in its segment."""
    made = builtins(message)
    return pack({**made, "plan": {**made["plan"], **values}})


def in_synchroniser(message: Any, /, parameters: Any, name: str = "hierarchical") -> bytes:
    return in_segment(message, synchroniser={"name": name, "parameters": parameters})


def in_step(**values: Any) -> bytes:
    return _in_record("steps", record(3, 0), values)


def in_round(**values: Any) -> bytes:
    return _in_record("rounds", a_round(3), values)


def _in_record(tag: str, good: Any, values: dict[str, Any]) -> bytes:
    names = type(good).__struct_fields__
    row = {name: getattr(good, name) for name in names} | values
    return pack({"type": tag, "records": [[row[name] for name in names]]})


_GROUPS = {"every": 2, "probes": 1, "staleness": 4, "mean": True}
_FALLBACK = Fallback(0, 0, "why")
_STATE = RunState(State.RUNNING, 5.0, "n")
_NODE = NodeState("n", "host", 2, 2**30, [], 5.0, "0")


def _segments(message: Any) -> dict[str, bytes]:
    """Of an `Adopted` or a `Proposal` whose segment has two steps of two ranks."""
    return {
        "groups holds a number": in_synchroniser(message, _GROUPS | {"groups": [0, 1]}),
        "groups holds a rank twice": in_synchroniser(message, _GROUPS | {"groups": [[0], [0]]}),
        "groups of other ranks": in_synchroniser(message, _GROUPS | {"groups": [[0, 7]]}),
        "every is a string": in_synchroniser(message, {"every": "often"}, "averaging"),
        "staleness is NaN": in_synchroniser(message, {"staleness": NAN}, "partial"),
        "unknown synchroniser": in_synchroniser(message, {}, "gossip"),
        "parameter keys are numbers": in_synchroniser(message, {1: 2}, "partial"),
        "a map is a key": in_synchroniser(message, {"x": Raw(b"\x81\x80\x01")}, "partial"),
        "parameter is an extension": in_synchroniser(message, {"x": EXTENSION}, "partial"),
        "parameter is nested 5,000 deep": in_synchroniser(message, {"x": NESTED}, "partial"),
        "parameter is nested 200 deep": in_synchroniser(message, {"x": NESTED_LESS}, "partial"),
        "parameters are a list": in_synchroniser(message, [1, 2], "partial"),
        "memory is an extension": in_segment(message, memory={"x": EXTENSION}),
        "memory has a number as key": in_segment(message, memory={"x": {1: 2}}),
        "memory is nested maps": in_segment(message, memory={"x": NESTED_MAPS}),
        "counts is ragged": in_segment(message, counts=[[2, 1], [1]]),
        "counts is 64 bits": in_segment(message, counts=[[2**63, 1], [1, 0]]),
        "counts and indices differ": in_segment(message, counts=[[2, 2], [1, 0]]),
        "indices are cut": in_segment(message, indices=b"\0\0\0"),
        "indices of no sample": in_segment(
            message, indices=np.array([0, 1, 2, 2**32 - 1], "<u4").tobytes()
        ),
        "first step is negative": in_segment(message, first_step=-1),
        "number is 64 bits": in_segment(message, seq=2**64 - 1),
        "version is huge": in_segment(message, version=2**40),
        "ett_s does not fit": in_segment(message, ett_s=[[1.0]]),
        "shares are infinite": in_segment(message, shares=[INF, 1.0]),
        "feedback is endless": in_segment(message, feedback=[[0, 2**62]]),
        "plan_s is infinite": in_segment(message, plan_s=INF),
        "source is unknown": in_segment(message, source="oracle"),
        "policy is a lone surrogate": in_segment(message, policy=SURROGATE),
    }


ADOPTED: dict[str, bytes] = _segments(adopted(0, 0)) | {
    "attempt is negative": changed(adopted(0, 0), attempt=-1),
    "attempt is 16 bits": changed(adopted(0, 0), attempt=2**15),
    "adopted_at is NaN": changed(adopted(0, 0), adopted_at=NAN),
}
FALLBACKS: dict[str, bytes] = {
    "attempt of a fallback is negative": changed(_FALLBACK, attempt=-1),
    "attempt of a fallback is 16 bits": changed(_FALLBACK, attempt=2**15),
    "segment of a fallback is 64 bits": changed(_FALLBACK, segment=2**64 - 1),
    "why is empty": changed(_FALLBACK, why=""),
    "why is too long": changed(_FALLBACK, why="x" * (MOST_WHY + 1)),
    "why is a lone surrogate": changed(_FALLBACK, why=SURROGATE),
}
_DEVICE: dict[str, Any] = {"kind": "cpu", "name": "Xeon", "cores": 4, "memory_bytes": 1}
HELLO: dict[str, bytes] = {
    "world is zero": changed(hello(), world=0),
    "world is huge": changed(hello(), world=2**31 - 1),
    "global batch is zero": changed(hello(), global_batch=0),
    "seed is negative": changed(hello(), seed=-1),
    "no samples": changed(hello(), sizes=b""),
    "sizes are cut": changed(hello(), sizes=b"\0" * 7),
    "sizes are NaN": changed(hello(), sizes=np.full(32, NAN).tobytes()),
    "sizes are negative": changed(hello(), sizes=np.full(32, -1.0).tobytes()),
    "loss_mean is unknown": changed(hello(), loss_mean="median"),
    "gradient_bytes is negative": changed(hello(), gradient_bytes=-1),
    "step is negative": changed(hello(), step=-1),
    "used is cut": changed(hello(), used=b"\0"),
    "used holds no sample": changed(hello(), used=np.array([99], "<u4").tobytes()),
    "started_at is NaN": changed(hello(), started_at=NAN),
    "limits of one rank": changed(hello(), limits=[3]),
    "devices of one rank": changed(hello(), devices=[_DEVICE]),
    "a device has no cores": changed(hello(), devices=[_DEVICE, _DEVICE | {"cores": 0}]),
    "a device is a lone surrogate": changed(
        hello(), devices=[_DEVICE, _DEVICE | {"name": SURROGATE}]
    ),
    "a device's memory is 64 bits": changed(
        hello(), devices=[_DEVICE, _DEVICE | {"memory_bytes": 2**63}]
    ),
    "a trial is NaN": changed(hello(), devices=[_DEVICE, _DEVICE | {"flops": NAN}]),
    "profiles of one rank": changed(hello(), profiles=[[[1, 1.0]]]),
    "profiles are NaN": changed(hello(), profiles=[[[1, NAN]], []]),
    "emulated is nothing known": changed(hello(), emulated={"gpu": "fast"}),
    "emulated is an extension": changed(hello(), emulated={"a_s": EXTENSION}),
    "emulated of one rank": changed(hello(), emulated={"a_s": [1.0], "b_s": [0.0]}),
    "attempt of the Hello is 32 bits": changed(hello(), attempt=2**31),
}
STEPS: dict[str, bytes] = {
    "rank is world": in_step(rank=2),
    "rank is negative": in_step(rank=-1),
    "step is negative in a record": in_step(step=-5),
    "step is 54 bits": in_step(step=2**54),
    "step is 64 bits in a record": in_step(step=2**64 - 1),
    "samples is negative": in_step(samples=-4),
    "attempt is negative in a record": in_step(attempt=-1),
    "load is NaN": in_step(load=NAN),
    "compute_s is infinite": in_step(compute_s=INF),
    "load is a string": in_step(load="forty"),
    "records is a number": pack({"type": "steps", "records": 5}),
    "records is endless": pack({"type": "steps", "records": ENDLESS}),
    "a record is short": pack({"type": "steps", "records": [[0, 1]]}),
    "a record is nested": pack({"type": "steps", "records": [NESTED]}),
}
ROUNDS: dict[str, bytes] = {
    "rank of a round is world": in_round(rank=2),
    "step of a round is negative": in_round(step=-1),
    "bytes is negative": in_round(bytes=-1),
    "waited_s is NaN": in_round(waited_s=NAN),
    "staleness is negative": in_round(staleness=[-1]),
    "staleness is a map": in_round(staleness={1: 1}),
}
STATES: dict[str, bytes] = {
    "state is unknown": changed(_STATE, state="sleeping"),
    "state is empty": changed(_STATE, state=""),
    "at is NaN": changed(_STATE, at=NAN),
    "exit code is 64 bits": changed(_STATE, state="failed", exit_code=2**63),
    "dropped is negative": changed(_STATE, dropped=-1),
    "message is a lone surrogate": changed(_STATE, message=SURROGATE),
    "node of a state is an extension": changed(_STATE, node=EXTENSION),
}
NODES: dict[str, bytes] = {
    "node is empty": changed(_NODE, node=""),
    "node is longer than an index takes": changed(_NODE, node=os.urandom(20_000).hex()),
    "cores is negative": changed(_NODE, cores=-1),
    "cores is 64 bits": changed(_NODE, cores=2**63),
    "heartbeat is NaN": changed(_NODE, at=NAN),
    "gpus is nested": changed(_NODE, gpus=NESTED),
}
UNREADABLE: dict[str, bytes] = {
    "no bytes": b"",
    "no MessagePack": b"\xc1",
    "nothing": pack(None),
    "no tag": pack({}),
    "tag is unknown": pack({"type": "gossip"}),
    "tag is a lone surrogate": pack({"type": SURROGATE}),
    "all values are missing": pack({"type": "hello"}),
    "unknown field is nested": pack({"type": "run_changed", "x": NESTED}),
    "unknown field is nested maps": pack({"type": "run_changed", "x": NESTED_MAPS}),
    "nested all the way": NESTED.data,
    "cut in the middle": changed(hello())[:40],
}
OTHERS: dict[str, bytes] = {  # readable, but nothing that ingest takes
    "a control message": pack({"type": "stop_training", "reason": "because"}),
    "a proposal": msgspec.msgpack.encode(Proposal(0, adopted(0, 0).plan, "me")),
    "a change of the control plane": pack({"type": "run_changed"}),
}

ENTRIES: dict[str, Fields] = {
    "another version": fields(b"", version=b"99"),
    "version of many digits": fields(b"", version=b"1" * 100_000),
    "version is no text": fields(b"", version=b"\xff\xfe"),
    "no version": {b"run": b"r", b"data": changed(_STATE)},
    "no run": {b"v": b"1", b"data": changed(_STATE)},
    "no data": {b"v": b"1", b"run": b"r"},
    "other fields": {b"some": b"thing"},
    "empty fields": {b"": b""},
    "run is no text": fields(changed(_STATE), run=b"\xed\xa0\x80"),
    "run is unknown": fields(changed(_STATE), run=b"ghost"),
    "run is empty": fields(changed(_STATE), run=b""),
    "run is NUL": fields(changed(_STATE), run=b"\0"),
    "run is long": fields(changed(_STATE), run=b"r" * 100_000),
}

# What no ingest may store: ingest rejects all of them. Ranks 0 and 1 train run "r".
TELEMETRY: dict[str, Fields] = {
    name: fields(data)
    for part in (HELLO, ADOPTED, FALLBACKS, STEPS, ROUNDS, STATES, NODES, UNREADABLE, OTHERS)
    for name, data in part.items()
} | ENTRIES
