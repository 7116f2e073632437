"""From the telemetry stream into the store, and on to those who watch a run.

Commit first, then one bus transaction: publish to ``live(run)``, acknowledge, delete. A crash
between the two repeats the batch, which changes nothing in the store and publishes it for the first
time. So every record is stored once and appears in the live stream, there twice only when another
ingest took over from one that was stuck, not dead. (Not so of nodes and rounds: who shows them asks
the store.) A bus or database that is away stops ingest, not its producers: entries wait on the bus.

No message stops the others. A message that cannot be read, stored or published goes to the stream
`DEAD` with its reason. When a batch fails and the database answers, its halves are tried by
themselves, until the message is alone that fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import msgspec
import redis

from paceline.core.outage import Outage
from paceline.wire import (
    INGEST_GROUP,
    LIVE_LENGTH,
    TELEMETRY,
    Adopted,
    Fallback,
    Hello,
    Message,
    NodeState,
    RoundBatch,
    RunState,
    StepBatch,
    WireError,
    decode,
    encode,
    live,
)
from paceline.wire.bus import connect
from paceline_backend import backends
from paceline_backend.control.consumer import Consumer, Entry
from paceline_backend.requests import streams
from paceline_backend.store import Store, StoreError, StoreRefusedError, telemetry

DEAD = "paceline:dead"  # what could not be stored, with the reason: for people to look at

_DEAD_LENGTH = 1_000
_REASON_LENGTH = 2_000  # characters
_BATCH = 500  # messages
_TAKEN = (StepBatch, RoundBatch, Adopted, Fallback, Hello, RunState, NodeState)
_BLOCK_S = 0.25  # how long `Ingest.run` may take to notice that it should stop

logger = logging.getLogger(__name__)


@dataclass
class IngestStats:
    """What one ingest has done; written by its thread, read by any."""

    rows: int = 0  # records of worker steps, repeated ones included
    batches: int = 0  # transactions
    dead: int = 0  # messages put aside, those of unknown runs included
    last_commit_at: float | None = None  # Unix time
    lag: int = 0  # entries on the bus that were not yet stored at the last commit


@dataclass
class _Item:
    """An entry, and what is known about it."""

    number: bytes
    fields: dict[bytes, bytes]
    run: str
    message: Message | None
    reason: str | None = None  # why it is put aside
    plans_itself: bool = False  # so is the run's backend

    def shown(self) -> dict[Any, Any]:
        """What the live stream gets: only the outline of a run that no controller plans.

        The outline of a run of 10,000 ranks is a ten-thousandth of it.
        """
        if self.plans_itself and isinstance(self.message, StepBatch):
            of_steps = {record.step: record for record in self.message.records}
            return encode(StepBatch([*of_steps.values()]), self.run)
        if self.plans_itself and isinstance(self.message, Adopted):
            segment = msgspec.structs.replace(
                self.message.segment,
                counts=[[] for _ in self.message.segment.counts],
                indices=b"",
                ett_s=[],
                shares=[],
                memory={},
            )
            return encode(msgspec.structs.replace(self.message, segment=segment), self.run)
        return self.fields


class Ingest:
    """Stores telemetry. Several may run at once, each in one thread.

    Args:
        store: where to.
        bus_url: ``redis://…``.
        name: of this consumer: unique among those that run, and better the same after a restart.
        linger_s: least time from one batch to the next: makes batches worth their transaction.
        claim_idle_s: a consumer that acknowledges nothing for so long loses its entries to this.
    """

    def __init__(
        self,
        store: Store,
        bus_url: str,
        name: str,
        *,
        linger_s: float = 0.01,
        claim_idle_s: float = 10.0,
    ) -> None:
        self.stats = IngestStats()
        self._store = store
        self._bus_url = bus_url
        self._name = name
        self._linger_s = linger_s
        self._claim_idle_s = claim_idle_s
        self._unknown_runs: set[str] = set()

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set. Waits out a bus or a database that is away."""
        with closing(connect(self._bus_url)) as client:
            consumer = Consumer(client, TELEMETRY, INGEST_GROUP, self._name, self._claim_idle_s)
            outage = Outage(logger, "ingest waits for the bus", "ingest goes on: the bus is back")
            while not stop.is_set():
                began = time.monotonic()
                try:
                    count = self._step(client, consumer, stop)
                except redis.RedisError as error:
                    consumer.reset()
                    stop.wait(outage.failed(error))
                    continue
                except _StoppedError:
                    return
                outage.over()
                if 0 < count < _BATCH:
                    stop.wait(began + self._linger_s - time.monotonic())

    def _step(self, client: redis.Redis, consumer: Consumer, stop: threading.Event) -> int:
        """Handles one batch; returns how many entries it had."""
        items = [_item(entry) for entry in consumer.read(_BATCH, _BLOCK_S)]
        good = [item for item in items if item.reason is None]
        ended = self._write(good, stop) if good else set()
        if items:
            self._settle(client, items, ended)
        return len(items)

    def _write(self, items: list[_Item], stop: threading.Event) -> set[str]:
        """Commits items, marks those that cannot be, and returns which of their runs are over.

        Raises:
            _StoppedError: before the database answered.
        """
        messages = [(item.run, item.message) for item in items if item.message is not None]
        outage = Outage(
            logger,
            f"ingest waits for {self._store.name}",
            f"ingest goes on: {self._store.name} is back",
        )
        reason: str | None = None
        surprises = 0
        while reason is None:
            try:
                written = telemetry.write(self._store, messages)
            except Exception as error:
                if self._at_fault(error):
                    surprises += not isinstance(error, StoreRefusedError)
                    if surprises != 1 or len(items) > 1:  # the last message gets a second chance
                        reason = _words(error)
                elif stop.wait(outage.failed(_words(error))):
                    raise _StoppedError from error
            else:
                outage.over()
                return self._written(items, written)
        outage.over()
        if len(items) == 1:
            items[0].reason = reason
            return set()
        half = len(items) // 2
        return self._write(items[:half], stop) | self._write(items[half:], stop)

    def _at_fault(self, error: Exception) -> bool:
        """Whether messages made writing fail, not the database."""
        if isinstance(error, StoreRefusedError):
            return True
        if isinstance(error, StoreError):
            return False
        try:
            telemetry.write(self._store, [])
        except Exception:
            return False
        return True

    def _written(self, items: list[_Item], written: telemetry.Written) -> set[str]:
        """Notes what became of items; returns which of their runs are over."""
        self.stats.rows += written.rows
        self.stats.batches += 1
        self.stats.last_commit_at = time.time()
        for item in items:
            item.plans_itself = backends.plans_itself(written.backends.get(item.run))
            if item.run in written.unknown and not isinstance(item.message, NodeState):
                item.reason = f"unknown run {item.run!r}"
        self._report(written.unknown)
        return set(written.ended)

    def _shown(self, item: _Item) -> dict[Any, Any] | None:
        """What the live stream gets of an item, if anything; marks it if that cannot be made."""
        if item.reason is not None or isinstance(item.message, NodeState | RoundBatch):
            return None
        try:
            return item.shown()
        except Exception as error:
            item.reason = _words(error)
            return None

    def _report(self, unknown: Iterable[str]) -> None:
        for run in unknown:
            if run not in self._unknown_runs:
                self._unknown_runs.add(run)
                logger.warning("telemetry of the unknown run %r goes to %s", run, DEAD)

    def _settle(self, client: redis.Redis, items: list[_Item], ended: set[str]) -> None:
        """Publishes, puts aside and acknowledges, all or nothing."""
        pipeline = client.pipeline(transaction=True)
        dead = 0
        for item in items:
            shown = self._shown(item)
            if item.reason is not None:
                dead += 1
                reason = item.reason[:_REASON_LENGTH].encode(errors="backslashreplace")
                put_aside = {**item.fields, b"entry": item.number, b"reason": reason}
                pipeline.xadd(DEAD, dict(put_aside.items()), maxlen=_DEAD_LENGTH)
            elif shown is not None:
                pipeline.xadd(live(item.run), shown, maxlen=LIVE_LENGTH)
        for run in ended:
            streams.expire(pipeline, run)
        numbers = [item.number for item in items]
        pipeline.xack(TELEMETRY, INGEST_GROUP, *numbers)
        pipeline.xdel(TELEMETRY, *numbers)
        pipeline.xlen(TELEMETRY)
        self.stats.lag = int(pipeline.execute()[-1])
        self.stats.dead += dead


def _words(error: Exception) -> str:
    if isinstance(error, StoreError | redis.RedisError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _item(entry: Entry) -> _Item:
    number, fields = entry
    try:
        run, message = decode(fields)
    except WireError as error:
        return _Item(number, fields, "", None, str(error))
    if isinstance(message, _TAKEN):
        return _Item(number, fields, run, message)
    return _Item(number, fields, run, message, f"{type(message).__name__} is not telemetry")


class _StoppedError(Exception):
    """`Ingest.run` was asked to stop while it waited."""
