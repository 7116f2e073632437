"""Hostile variants of good messages, drawn from a seed: changed bytes, and changed structures."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from support import poison

# How many messages: `make test-long` draws the larger number.
COUNTS = (1_000, pytest.param(10_000, marks=pytest.mark.long))

_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    7,
    2**15,
    2**31,
    2**53,
    2**63,
    2**64 - 1,
    -(2**63),
    0.5,
    poison.NAN,
    poison.INF,
    -poison.INF,
    "",
    "partial",
    "hierarchical",
    "x" * 5_000,
    b"\xff",
    [],
    [[]],
    [0, 1],
    [[0], [1]],
    [[0, 0]],
    {},
    {1: 2},
    {"groups": 5},
    {"probes": 2, "staleness": 4, "mean": True},
    poison.EXTENSION,
    poison.SURROGATE,
    poison.NESTED,
    poison.NESTED_MAPS,
    poison.NESTED_LESS,
    poison.ENDLESS,
)
_KEYS = ("probes", "quorum", "parts", "spare", "groups", "every", "other", "", 1, b"\xff", None)


def variants(good: bytes, count: int, seed: int) -> Iterator[bytes]:
    """So many variants of a MessagePack text; the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        if rng.random() < 0.3:
            yield _other_bytes(good, rng)
            continue
        value = msgspec.msgpack.decode(good)
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            value = _other(value, rng)
        yield poison.pack(value)


def _other_bytes(good: bytes, rng: random.Random) -> bytes:
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(4)
        if kind == 0:
            data[at : at + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[at : at + rng.randint(1, 8)]
        elif kind == 2:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            del data[at:]
    return bytes(data)


def _other(value: Any, rng: random.Random) -> Any:
    """The value with a part of it changed, somewhere."""
    inside = isinstance(value, dict | list) and len(value) > 0
    if not inside or rng.random() < 0.1:
        return rng.choice(_VALUES)
    if isinstance(value, dict):
        return _other_map(value, rng)
    changed = list(value)
    at, kind = rng.randrange(len(changed)), rng.random()
    if kind < 0.15:
        del changed[at]
    elif kind < 0.3:
        changed.insert(at, rng.choice([changed[at], *_VALUES]))
    else:
        changed[at] = _other(changed[at], rng)
    return changed


def _other_map(value: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    changed = dict(value)
    key, kind = rng.choice(list(changed)), rng.random()
    if kind < 0.1:
        del changed[key]
    elif kind < 0.25:
        changed[rng.choice(_KEYS)] = rng.choice(_VALUES)
    else:
        changed[key] = _other(changed[key], rng)
    return changed
