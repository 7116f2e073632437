"""Stored blobs: their version, those of the released version, and those of a newer one."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator

import msgspec
import pytest

from paceline.wire import Hello, Segment
from paceline_backend.insight.whatif.answer import Forecast
from paceline_backend.store import StoreError, blobs
from support.records import adopted, hello

# What the structs looked like for each version. If this fails, the struct has changed: do stored
# blobs still read the same (a new field with a default does)? Then put the new digest here. Else
# raise `blobs.VERSION` and convert older blobs in `blobs.unpack`.
SCHEMAS = {1: "215476f8895f3e20"}


@pytest.fixture(autouse=True)
def _each_warning_anew() -> Iterator[None]:
    blobs._warn_once.cache_clear()
    yield


def newer(value: object) -> bytes:
    return marked(blobs.VERSION + 1, value)


def marked(version: int, value: object) -> bytes:
    return b"\xc1" + bytes([version]) + msgspec.msgpack.encode(value)


def test_a_blob_reads_back() -> None:
    first = hello()
    assert blobs.hello(blobs.pack(first)) == first
    segment = adopted(0, 0).segment
    assert blobs.segment(blobs.pack(segment), None, None) == segment
    assert blobs.unpack(blobs.pack([3, 0, 1]), list[int]) == [3, 0, 1]


def test_blobs_without_a_version_are_those_of_the_released_version() -> None:
    first = hello()
    assert blobs.hello(msgspec.msgpack.encode(first)) == first
    assert blobs.unpack(msgspec.msgpack.encode([3, 0, 1]), list[int]) == [3, 0, 1]
    assert blobs.unpack_json({"step": 7}, "forecast") == {"step": 7}


def test_version_1_is_written_as_the_released_version_reads_it() -> None:
    """Who takes a database back to 0.1.0 finds what was stored meanwhile."""
    assert blobs.VERSION == 1, "convert blobs in `paceline db downgrade`, and test that instead"
    assert msgspec.msgpack.decode(blobs.pack(hello()), type=Hello) == hello()
    assert blobs.pack_json({"step": 7}) == {"step": 7}


def test_a_later_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blobs, "VERSION", 2)
    first = hello()
    assert blobs.pack(first) == marked(2, first)
    assert blobs.hello(blobs.pack(first)) == blobs.hello(marked(1, first)) == first
    stored = blobs.pack_json({"step": 7})
    assert stored != {"step": 7}
    assert blobs.unpack_json(json.loads(json.dumps(stored)), "forecast") == {"step": 7}


def test_a_newer_blob_is_refused_with_the_mend() -> None:
    words = r"a stored Hello has version \d+, .* up to \d+: upgrade paceline"
    with pytest.raises(StoreError, match=words):
        blobs.hello(newer(hello()))
    with pytest.raises(StoreError, match="a stored Segment has version"):
        blobs.segment(newer(adopted(0, 0).segment), None, None)
    with pytest.raises(StoreError, match="a stored forecast has version"):
        blobs.unpack_json({"stored_version": blobs.VERSION + 1, "step": 7}, "forecast")


@pytest.mark.parametrize("blob", [b"", b"\xc1", b"\xc1\x01", b"nonsense", b"\xc1\x01nonsense"])
def test_what_is_no_message_is_left_out(blob: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert blobs.hello(blob) is None
    assert "a stored Hello is left out" in caplog.text


def test_stored_structs_are_those_that_the_version_stands_for() -> None:
    _, components = msgspec.json.schema_components([Hello, Segment, Forecast])
    for component in components.values():
        component.pop("description", None)
    text = json.dumps(components, sort_keys=True)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == SCHEMAS[blobs.VERSION]
