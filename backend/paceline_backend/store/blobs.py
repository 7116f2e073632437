"""Messages that the database stores whole, as MessagePack."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from paceline.wire import Segment

logger = logging.getLogger(__name__)

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """Return a value as a blob."""
    return msgspec.msgpack.encode(value)


def unpack(blob: bytes, kind: type[T]) -> T:
    """Return the value of a blob.

    Args:
        blob: from the database.
        kind: of the value.
    """
    return msgspec.msgpack.decode(blob, type=kind)


def segment(blob: bytes, world: int | None, samples: int | None) -> Segment | None:
    """Return a stored segment; None if it does not fit the Hello of its attempt.

    A segment may come before that Hello, and nobody could compare the two then.

    Args:
        blob: from the database.
        world: see `Segment.problem`.
        samples: see `Segment.problem`.
    """
    value = unpack(blob, Segment)
    if (reason := value.problem(world, samples)) is None:
        return value
    _warn_once(f"stored segment {value.seq} is left out: {reason}")
    return None


@lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
