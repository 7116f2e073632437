"""Sink of a rank's telemetry: the bus, else the spool on disk, else a queue in memory.

The sink raises no error for a failed delivery, but retries. It counts records as lost only if bus
and spool do not accept them and the memory is full, or if neither bus nor spool accepts them before
the rank ends.
"""

from __future__ import annotations

import logging
from collections import deque

import redis

from paceline.core.outage import Outage
from paceline.node.spool import Spool
from paceline.wire import TELEMETRY, Hello, Message, MetricBatch, RoundBatch, StepBatch, encode
from paceline.wire.bus import connect
from paceline.wire.parts import encode_hello

logger = logging.getLogger(__name__)

# Maximum number of bytes of messages in memory. It is enough for hours of steps while bus and disk
# are full or unavailable.
HELD_BYTES = 16 << 20

_RETRY_S = 0.5
_TIMEOUT_S = 1.0

_BATCHES = (StepBatch, MetricBatch, RoundBatch)
_Fields = dict[bytes, bytes]


class Sink:
    """Sink that delivers each message at least once, or counts its records as lost.

    Not thread-safe, except `lost`. Messages that neither bus nor spool accepts are kept in memory,
    at most `HELD_BYTES` (not counting the `Hello`), and are offered to bus and spool again. Only an
    outage of the bus changes the order of messages.

    Args:
        run: public run id.
        bus: Redis URL; None: all messages go to the spool.
        spool: stores messages that the bus does not accept; None: they stay in memory until
            `close`.
        stream: name of the bus's stream to write to.
    """

    def __init__(
        self, run: str, bus: str | None, spool: Spool | None, stream: str = TELEMETRY
    ) -> None:
        self._run = run
        self._stream = stream
        self._bus = connect(bus, timeout_s=_TIMEOUT_S) if bus is not None else None
        self._spool = spool
        # Messages in memory, each with its number of records.
        self._held: deque[tuple[_Fields, int]] = deque()
        self._held_bytes = 0
        # Entries of a Hello that neither bus nor spool has accepted yet.
        self._hello: deque[_Fields] = deque()
        self._lost = 0
        self._noted = 0
        away = "the bus does not accept telemetry; writing it to the spool"
        self._bus_outage = _outage(away, "the bus accepts telemetry again")
        full = "telemetry cannot be written to the spool; keeping it in memory"
        self._spool_outage = _outage(full, "no telemetry is left in memory")

    @property
    def lost(self) -> int:
        """Return the number of records lost so far. Any thread may call this."""
        return self._lost + (self._spool.lost if self._spool is not None else 0)

    def deliver(self, message: Message) -> None:
        """Send, spool or keep a message."""
        # Send a Hello before all messages in memory, because controllers plan only once they have
        # the Hello.
        if isinstance(message, Hello):
            self._deliver_hello(message)
            return
        fields = encode(message, self._run)
        records = len(message.records) if isinstance(message, _BATCHES) else 1
        if self._held or not self._taken(fields, records):
            self._hold(fields, records)

    def _deliver_hello(self, hello: Hello) -> None:
        try:
            self._hello = deque(encode_hello(hello, self._run))
        except ValueError as error:
            logger.error("the control plane cannot plan this attempt: %s", error)
            return
        while self._hello and self._taken(self._hello[0], 1):
            self._hello.popleft()

    def retry(self) -> None:
        """Offer the messages in memory to bus and spool again."""
        # Send the Hello first, because the control plane must know the attempt before its records.
        while self._hello and self._to_bus(self._hello[0]):
            self._hello.popleft()
        while self._held and not (self._bus_paused and self._spool_paused):
            fields, records = self._held[0]
            if not self._taken(fields, records):
                # Retry this message last: if it is larger than the spool, it must not delay others.
                self._held.rotate(-1)
                break
            self._release()

    def tend(self, dropped: int) -> None:
        """Close the spool's chunk if it is old; store `dropped`, the number of lost records."""
        if self._spool is not None:
            self._spool.roll()
            if not self._spool_outage.paused:
                self._note(self._spool, dropped)

    def end(self) -> None:
        """Offer the messages in memory for the last time, and count the rest as lost."""
        self.retry()
        while self._hello and self._to_spool(self._hello[0], 1, now=True):
            self._hello.popleft()
        if self._hello:
            logger.error(
                "the run's description could not be sent: the control plane will not show this "
                "attempt (%d bytes; a larger PACELINE_SPOOL_BYTES would keep it on the node)",
                sum(map(_size, self._hello)),
            )
            self._lost += 1
        before = self._lost
        while self._held:
            fields, records = self._held[0]
            self._lost += 0 if self._to_spool(fields, records, now=True) else records
            self._release()
        if self._lost > before:
            logger.error(
                "%d telemetry records are lost: neither bus nor spool accepted them before the end",
                self._lost - before,
            )

    def close(self, dropped: int) -> None:
        """Close spool and connection; store `dropped`, the number of lost records, in the spool."""
        if self._spool is not None:
            self._spool.close()
            self._note(self._spool, dropped)
        if self._bus is not None:
            self._bus.close()

    @property
    def _bus_paused(self) -> bool:
        return self._bus is None or self._bus_outage.paused

    @property
    def _spool_paused(self) -> bool:
        return self._spool is None or self._spool_outage.paused

    def _hold(self, fields: _Fields, records: int) -> None:
        size = _size(fields)
        if self._held_bytes + size <= HELD_BYTES:
            self._held.append((fields, records))
            self._held_bytes += size
            return
        if self._lost == 0:
            logger.error(
                "telemetry records are lost: the memory buffer of %d MiB is full", HELD_BYTES >> 20
            )
        self._lost += records

    def _release(self) -> None:
        fields, _ = self._held.popleft()
        self._held_bytes -= _size(fields)
        if not self._held:
            self._spool_outage.succeeded()

    def _taken(self, fields: _Fields, records: int) -> bool:
        return self._to_bus(fields) or self._to_spool(fields, records)

    def _to_bus(self, fields: _Fields) -> bool:
        if self._bus is None or self._bus_outage.paused:
            return False
        try:
            self._bus.xadd(self._stream, dict(fields.items()))
        except redis.RedisError as error:
            self._bus_outage.failed(error)
            return False
        if self._bus_outage.active and self._spool is not None:
            self._spool.close()
        self._bus_outage.succeeded()
        return True

    def _to_spool(self, fields: _Fields, records: int, *, now: bool = False) -> bool:
        """Append a message to the spool; return False if the spool does not accept it.

        With `now`, the spool is tried even during the pause after a failure.
        """
        if self._spool is None or (self._spool_outage.paused and not now):
            return False
        try:
            if self._spool.append(fields, records):
                return True
            self._spool_outage.failed("the disk or the spool is full")
        except OSError as error:
            self._spool_outage.failed(error)
        return False

    def _note(self, spool: Spool, dropped: int) -> None:
        if dropped > self._noted:
            try:
                spool.note_dropped(dropped)
                self._noted = dropped
            except OSError as error:
                self._spool_outage.failed(error)
                logger.warning(
                    "the number of dropped telemetry records cannot be stored: %s", error
                )


def _outage(begins: str, ends: str) -> Outage:
    return Outage(logger, begins, ends, first_s=_RETRY_S, most_s=_RETRY_S)


def _size(fields: _Fields) -> int:
    return sum(map(len, fields.values()))
