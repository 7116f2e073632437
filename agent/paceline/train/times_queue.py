"""Queue in the ranks' store through which ranks send the records of their steps to rank 0."""

from __future__ import annotations

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
# Minimum interval at which a rank sends its records, in seconds, and for each rank of the run: rank
# 0 takes some 60 µs to read an entry of the queue.
_SEND_S, _SEND_S_PER_RANK = 0.1, 1 / 300


class TimesQueue:
    """Sender of a rank's records to rank 0, through the ranks' store. For one thread."""

    def __init__(self, store: Store, world: int) -> None:
        # A connection of its own, because other calls may block the store's connection.
        self._store: Any = store.clone()  # type: ignore[attr-defined]
        self._period_s = max(_SEND_S, _SEND_S_PER_RANK * world)
        self._records: list[StepRecord] = []
        self._next = 0.0

    def add(self, records: Sequence[StepRecord]) -> None:
        """Add records; `send` sends them."""
        self._records += records

    def send(self) -> None:
        """Send the records, unless the last ones were sent just now."""
        now = time.monotonic()
        if not self._records or now < self._next:
            return
        batch, self._records, self._next = StepBatch(self._records), [], now + self._period_s
        # The store ends with rank 0, and with it the need for records.
        try:
            self._store.queue_push(QUEUE, msgspec.msgpack.encode(batch))
        except (DistError, RuntimeError) as error:
            logger.debug("records were not sent to rank 0: %s", error)
