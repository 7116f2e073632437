"""Queue in the ranks' store through which ranks send the records of their steps to rank 0."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed import DistError

from paceline.wire import StepBatch, StepRecord

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

QUEUE = "paceline/times"
_SIGNATURE_BYTES = 16
# A rank sends its records at most every `_SEND_S` seconds, and at most every `_SEND_S_PER_RANK`
# seconds times the number of ranks: rank 0 takes some 60 µs to read an entry of the queue.
_SEND_S, _SEND_S_PER_RANK = 0.1, 1 / 300


class TimesQueue:
    """Sender of a rank's records to rank 0, through the ranks' store. For one thread.

    Records are signed with the ranks' `key`, because any process that can connect to the store can
    write there.
    """

    def __init__(self, store: Store, world: int, key: bytes) -> None:
        self._key = key
        # A connection of its own, because other calls may block the store's connection.
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._period_s = max(_SEND_S, _SEND_S_PER_RANK * world)
        self._records: list[StepRecord] = []
        self._next = 0.0

    def add(self, records: Sequence[StepRecord]) -> None:
        """Add records; `send` sends them."""
        self._records += records

    def send(self, *, now: bool = False) -> None:
        """Send the records, unless the last ones were sent just now and `now` is False."""
        at = time.monotonic()
        if not self._records or (at < self._next and not now):
            return
        batch, self._records, self._next = StepBatch(self._records), [], at + self._period_s
        # The store ends with rank 0, and with it the need for records.
        try:
            packed = msgspec.msgpack.encode(batch)
            self._store.queue_push(QUEUE, _signature(packed, self._key) + packed)
        except (DistError, RuntimeError) as error:
            logger.debug("records were not sent to rank 0: %s", error)


def opened(entry: bytes, key: bytes) -> bytes | None:
    """Return the encoded `StepBatch` of a queue's entry; None if no rank has signed it."""
    signature, packed = entry[:_SIGNATURE_BYTES], entry[_SIGNATURE_BYTES:]
    return packed if hmac.compare_digest(signature, _signature(packed, key)) else None


def _signature(packed: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(packed, key=key, digest_size=_SIGNATURE_BYTES).digest()
