"""Stored values that are no columns: what they look like as bytes or JSON, in which version.

A change of the messages in `paceline.wire` is a change of what is stored. Whoever makes one raises
`VERSION` here and converts older blobs in `unpack`; a test compares the structs' schema with the
one that `VERSION` stands for.

Version 1 is what release 0.1.0 writes, and what it reads when somebody goes back to it: the message
alone. A MessagePack blob of a later version is `_MARK`, the version as one byte, and the message; a
JSON blob has its version under `_KEY`. Version 1 is also read with a mark.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from paceline.wire import Hello, Segment
from paceline_backend.store import refusals
from paceline_backend.store.database import StoreError

logger = logging.getLogger(__name__)

VERSION = 1

_MARK = b"\xc1"  # MessagePack never begins with this byte
_KEY = "stored_version"

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """A value as a MessagePack blob."""
    message = msgspec.msgpack.encode(value)
    return message if VERSION == 1 else _MARK + bytes([VERSION]) + message


def unpack(blob: bytes, kind: type[T]) -> T:
    """The value of a MessagePack blob.

    Args:
        blob: from the database.
        kind: of the value.

    Raises:
        StoreError: a newer release wrote it.
        ValueError, TypeError, RecursionError: it holds no value of this kind.
    """
    version, body = (blob[1], blob[2:]) if blob[:1] == _MARK and blob[1:2] else (1, blob)
    _refuse_newer(version, kind.__name__)
    return msgspec.msgpack.decode(body, type=kind)


def pack_json(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping as a JSON blob."""
    return dict(value) if VERSION == 1 else {**value, _KEY: VERSION}


def unpack_json(blob: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The mapping of a JSON blob.

    Args:
        blob: from the database.
        what: it is, for the message.

    Raises:
        StoreError: a newer release wrote it.
    """
    _refuse_newer(blob.get(_KEY, 1), what)
    return {name: value for name, value in blob.items() if name != _KEY}


def hello(blob: bytes) -> Hello | None:
    """A stored Hello; None if it cannot be used: older releases stored any.

    Raises:
        StoreError: a newer release wrote it.
    """
    value = _decoded(blob, Hello)
    if value is None or (reason := refusals.of_hello(value)) is None:
        return value
    _warn_once(f"a stored Hello is left out: {reason}")
    return None


def segment(blob: bytes, world: int | None, samples: int | None) -> Segment | None:
    """A stored segment; None if it cannot be used: older releases stored any.

    Args:
        blob: from the database.
        world: see `Segment.problem`.
        samples: see `Segment.problem`.

    Raises:
        StoreError: a newer release wrote it.
    """
    value = _decoded(blob, Segment)
    if value is None or (reason := value.problem(world, samples)) is None:
        return value
    _warn_once(f"stored segment {value.seq} is left out: {reason}")
    return None


def _decoded(blob: bytes, kind: type[T]) -> T | None:
    try:
        return unpack(blob, kind)
    except (ValueError, TypeError, RecursionError) as error:  # msgspec's errors are ValueErrors
        _warn_once(f"a stored {kind.__name__} is left out: {error}")
        return None


def _refuse_newer(version: Any, what: str) -> None:
    if not isinstance(version, int) or version > VERSION:
        raise StoreError(
            f"a stored {what} has version {version}, and this release reads versions up to "
            f"{VERSION}: upgrade paceline"
        )


@lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
