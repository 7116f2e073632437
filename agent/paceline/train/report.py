"""What a rank reports. A background thread sends it, and training never waits for that thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

import redis

from paceline.core.outage import Outage
from paceline.node.spool import Spool
from paceline.train.parts import Step
from paceline.train.sync.base import Round
from paceline.train.timing import RunningStep
from paceline.wire import (
    TELEMETRY,
    Hello,
    Message,
    RoundBatch,
    RoundRecord,
    StepBatch,
    StepRecord,
    encode,
)
from paceline.wire.bus import connect

logger = logging.getLogger(__name__)

FLUSH_S = 0.05
QUEUE_LIMIT = 20_000  # some MB: minutes of steps while a dead connection blocks the thread
BATCH_LIMIT = 1_000
_RETRY_S = 0.5
_TIMEOUT_S = 1.0


class Emitter:
    """Sends messages to the bus, or to the spool while the bus is away; counts what is lost.

    `record` and `send` never block. The thread that trains calls both; a thread that exchanges
    gradients may call `record`. Each message is delivered at least once. The records of a thread
    keep their order, and precede what that thread sends later; only an outage of the bus breaks the
    order. A `Hello` that neither bus nor spool takes is kept and sent again.

    Args:
        run: public run id.
        bus: Redis URL; None: everything goes to the spool.
        spool: keeps what the bus does not take; None: it is dropped and counted.
        memory: measures the memory in use, in bytes; the thread calls it at every flush.
    """

    def __init__(
        self, run: str, bus: str | None, spool: Spool | None, memory: Callable[[], int]
    ) -> None:
        self._run = run
        self._bus = connect(bus, timeout_s=_TIMEOUT_S) if bus is not None else None
        self._spool = spool
        self._memory = memory
        self._queue: deque[StepRecord | RoundRecord | Message] = deque()
        self._full = threading.Lock()  # held only to count lost records
        self._wake = threading.Event()
        self._closing = False
        self._outage = Outage(
            logger,
            "the bus does not take telemetry, which is spooled",
            "the bus takes telemetry again",
            first_s=_RETRY_S,
            most_s=_RETRY_S,
        )
        self._noted = 0
        self._hello: dict[bytes, bytes] | None = None  # if neither bus nor spool has taken it
        self.memory_bytes = 0  # at the last flush
        self.overflowed = 0  # records lost before the thread took them
        self.undelivered = 0  # records that the background thread lost
        self._thread = threading.Thread(target=self._work, name="paceline-telemetry", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records lost so far."""
        lost = self._spool.lost if self._spool is not None else 0
        return self.overflowed + self.undelivered + lost

    def record(self, record: StepRecord | RoundRecord) -> None:
        """Sends a step's or a round's record with the next flush."""
        self._enqueue(record)

    def send(self, message: Message) -> None:
        """Sends a message now, after the records before it."""
        self._enqueue(message)
        self._wake.set()

    def _enqueue(self, item: StepRecord | RoundRecord | Message) -> None:
        if len(self._queue) < QUEUE_LIMIT:
            self._queue.append(item)
        else:
            with self._full:  # two threads may lose something at once
                self.overflowed += 1

    def close(self, timeout_s: float = 3.0) -> None:
        """Delivers what is left and ends the thread, within the timeout. It may be called again."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "telemetry did not end within %g s: its last records are lost", timeout_s
            )

    def _work(self) -> None:
        while True:
            closing = self._closing
            self.memory_bytes = self._memory()
            self._retry_hello()
            for message in self._collect():
                self._deliver(message)
            if self._spool is not None:
                self._tend(self._spool)
            if closing:
                self._give_up_hello()
                break
            self._wake.wait(FLUSH_S)
            self._wake.clear()
        if self._spool is not None:
            self._spool.close()
            self._note(self._spool)
        if self._bus is not None:
            self._bus.close()

    def _collect(self) -> list[Message]:
        """The queued messages, with the records of steps and those of rounds joined to batches.

        Records keep their order, and no record passes a message.
        """
        messages: list[Message] = []
        steps: list[StepRecord] = []  # records of the newest batch of steps
        rounds: list[RoundRecord] = []  # records of the newest batch of rounds
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, StepRecord):
                if not steps or len(steps) == BATCH_LIMIT:
                    steps = []
                    messages.append(StepBatch(steps))
                steps.append(item)
            elif isinstance(item, RoundRecord):
                if not rounds or len(rounds) == BATCH_LIMIT:
                    rounds = []
                    messages.append(RoundBatch(rounds))
                rounds.append(item)
            else:
                steps, rounds = [], []
                messages.append(item)
        return messages

    def _deliver(self, message: Message) -> None:
        fields = encode(message, self._run)
        records = len(message.records) if isinstance(message, StepBatch | RoundBatch) else 1
        if not self._to_bus(fields) and not self._to_spool(fields, records):
            if isinstance(
                message, Hello
            ):  # controllers plan only after a Hello: send it again later
                self._hello = fields
            else:
                self.undelivered += records

    def _retry_hello(self) -> None:
        """Comes before other messages: the control plane must know the attempt first."""
        if self._hello is not None and self._to_bus(self._hello):
            self._hello = None

    def _give_up_hello(self) -> None:
        self._retry_hello()
        if self._hello is not None:
            logger.error(
                "the run's description could not be sent: the control plane will not show this "
                "attempt (%d bytes; a larger PACELINE_SPOOL_BYTES would keep it on the node)",
                sum(map(len, self._hello.values())),
            )
            self.undelivered += 1

    def _to_bus(self, fields: dict[bytes, bytes]) -> bool:
        if self._bus is None or self._outage.paused:
            return False
        try:
            self._bus.xadd(TELEMETRY, dict(fields.items()))
        except redis.RedisError as error:
            self._outage.failed(error)
            return False
        if self._outage.active and self._spool is not None:
            self._spool.close()
        self._outage.over()
        return True

    def _to_spool(self, fields: dict[bytes, bytes], records: int) -> bool:
        if self._spool is None:
            return False
        try:
            return self._spool.append(fields, records)
        except OSError as error:
            if self.undelivered == 0:
                logger.warning("telemetry cannot be spooled: %s", error)
            return False

    def _tend(self, spool: Spool) -> None:
        spool.roll()
        self._note(spool)

    def _note(self, spool: Spool) -> None:
        if self.dropped > self._noted:
            try:
                spool.note_dropped(self.dropped)
                self._noted = self.dropped
            except OSError as error:
                logger.warning("dropped telemetry records cannot be noted: %s", error)


class Reporter:
    """Makes records of a rank's finished steps. For one thread.

    Args:
        emitter: takes the records.
        attempt: of the run.
        rank: whose steps they are.
    """

    def __init__(self, emitter: Emitter, attempt: int, rank: int) -> None:
        self._emitter = emitter
        self._attempt = attempt
        self._rank = rank
        self._seq = 0
        self._over: deque[RunningStep] = deque()

    def over(self, running: RunningStep) -> None:
        """Takes a finished step; reads it once the device is through with it, or a step later."""
        self._over.append(running)
        while self._over and (len(self._over) > 1 or self._over[0].readable):
            self._report(self._over.popleft())

    def flush(self) -> None:
        """Reports all finished steps now."""
        while self._over:
            self._report(self._over.popleft())

    def _report(self, running: RunningStep) -> None:
        step = running.step
        compute_s, sync_s, loss = running.read()
        self._emitter.record(
            StepRecord(
                attempt=self._attempt,
                rank=self._rank,
                seq=self._seq,
                step=step.step,
                epoch=step.epoch,
                segment=step.segment,
                samples=step.samples,
                load=step.load,
                data_s=running.data_s,
                compute_s=compute_s,
                sync_s=sync_s,
                step_s=running.step_s,
                ended_at=running.ended_at,
                ett_s=step.ett_s,
                loss=loss,
                memory_bytes=self._emitter.memory_bytes,
                squares=step.squares,
                longest=step.longest,
            )
        )
        self._seq += 1


class RoundReporter:
    """Makes records of the rounds that a rank reports. For any thread, but one at a time.

    Args:
        emitter: takes the records.
        attempt: of the run.
        rank: that reports.
    """

    def __init__(self, emitter: Emitter, attempt: int, rank: int) -> None:
        self._emitter = emitter
        self._attempt = attempt
        self._rank = rank
        self._seq = 0

    def over(self, step: Step, finished: Round) -> None:
        """Takes a round that has just ended, and the step that the rank is in."""
        record = RoundRecord(
            attempt=self._attempt,
            rank=self._rank,
            seq=self._seq,
            segment=step.segment,
            step=step.step,
            ended_at=time.time(),
            **asdict(finished),
        )
        self._emitter.record(record)
        self._seq += 1
