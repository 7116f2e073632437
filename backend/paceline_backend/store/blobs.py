"""Encode and decode messages that the database stores as MessagePack blobs."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from paceline.wire import Plan

logger = logging.getLogger(__name__)

T = TypeVar("T")


def pack(value: Any) -> bytes:
    """Encode a value as a blob."""
    return msgspec.msgpack.encode(value)


def unpack(blob: bytes, kind: type[T]) -> T:
    """Decode a blob into a value of type `kind`."""
    return msgspec.msgpack.decode(blob, type=kind)


def plan(blob: bytes, world: int | None, samples: int | None) -> Plan | None:
    """Decode a stored plan; return None if it does not fit the Hello of its attempt.

    A plan can arrive and be stored before that Hello, so the two cannot be compared earlier. For
    `world` and `samples` see `Plan.defect`.
    """
    value = unpack(blob, Plan)
    if (reason := value.misfit(world, samples)) is None:
        return value
    _warn_once(f"stored segment {value.seq} is ignored: {reason}")
    return None


@lru_cache(maxsize=1024)
def _warn_once(text: str) -> None:
    logger.warning("%s", text)
