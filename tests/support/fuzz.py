"""Hostile variants of good messages, drawn from a seed: changed bytes, and changed structures."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from support import poison

# How many messages: `make test-all` draws the larger number.
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
_WORDS = (
    *(
        "",
        "-",
        "--",
        "..",
        "../../x",
        "a/b",
        "x?y=1",
        "x#y",
        "%2e%2e",
        "*",
        "a\0b",
        "a\nb",
    ),
    *("-1", "0", "1e999", "nan", "9" * 400, "1-1", "x" * 10_000, "{}", "[", "null", "é", "\x1b[2J"),
    *("--json", "--limit", "--run", "--param", "a=b", "=", "a=NaN", "--state", "--force", "--help"),
    *("--server", "http://", "http://[", "ftp://x", "http://127.0.0.1:1", "http://127.0.0.1:99999"),
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


def json_variants(good: Any, count: int, seed: int) -> Iterator[bytes]:
    """So many variants of a JSON value as texts, some of them no JSON; the same for a seed."""
    rng = random.Random(seed)
    for _ in range(count):
        value = good
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            value = _other(value, rng)
        text = _json(value).encode(errors="surrogatepass")
        yield _other_bytes(text, rng) if rng.random() < 0.2 else text


def arguments(good: list[str], count: int, seed: int) -> Iterator[list[str]]:
    """So many variants of a command line's arguments; the same for the same seed."""
    rng = random.Random(seed)
    for _ in range(count):
        words = list(good)
        for _ in range(rng.choice([1, 1, 2, 3])):
            at, kind = rng.randrange(len(words) + 1), rng.random()
            if kind < 0.3:
                del words[at : at + 1]
            elif kind < 0.6:
                words.insert(at, rng.choice(_WORDS))
            else:
                words[at : at + 1] = [rng.choice(_WORDS)]
        yield words


def _json(value: Any) -> str:
    """A value as JSON, or what is as near: NaN, lone surrogates, deep nesting."""
    if isinstance(value, dict):
        parts = (f"{json.dumps(str(key))}:{_json(item)}" for key, item in value.items())
        return "{" + ",".join(parts) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_json, value)) + "]"
    if value is poison.SURROGATE:
        return '"\\ud800"'
    if isinstance(value, poison.Raw):
        return "[" * len(value.data) + "]" * len(value.data)
    return json.dumps(value, default=repr)


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
