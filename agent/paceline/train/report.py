"""What a rank reports. A background thread sends it, and training never waits for that thread."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

import msgspec

from paceline.node.spool import Spool
from paceline.train.mesh.times import GroupTimes, PendingTimes
from paceline.train.outlet import Outlet
from paceline.train.parts import Step
from paceline.train.sync.base import Round
from paceline.train.timing import RunningStep
from paceline.wire import (
    TELEMETRY,
    Evaluation,
    Message,
    MetricBatch,
    MetricRecord,
    RoundBatch,
    RoundRecord,
    StepBatch,
    StepRecord,
)

logger = logging.getLogger(__name__)

FLUSH_S = 0.05
QUEUE_LIMIT = 20_000  # some MB: minutes of steps while a dead connection blocks the thread
BATCH_LIMIT = 1_000
_BEHIND = 1_000  # finished steps that wait for the thread to make their records, at most

Record = StepRecord | MetricRecord | RoundRecord


class Emitter:
    """Sends messages through an `Outlet`, and counts what is lost.

    `record` and `send` never block. The thread that trains calls both; a thread that exchanges
    gradients may call `record`. Each message is delivered at least once. The records of a thread
    keep their order, and precede what that thread sends later; only an outage of the bus breaks the
    order. What neither bus nor spool takes waits in memory.

    Args:
        run: public run id.
        bus: Redis URL; None: everything goes to the spool.
        spool: keeps what the bus does not take; None: memory does until `close`.
        memory: measures the memory in use, in bytes; the thread calls it every `FLUSH_S`.
        stream: of the bus, to write to.
        look: what is to be sent besides, if anything; the thread calls it at every flush.
    """

    def __init__(
        self,
        run: str,
        bus: str | None,
        spool: Spool | None,
        memory: Callable[[], int],
        stream: str = TELEMETRY,
        look: Callable[[], Message | None] = lambda: None,
    ) -> None:
        self._look = look
        self._outlet = Outlet(run, bus, spool, stream)
        self._memory = memory
        self._queue: deque[Record | Message | threading.Event] = deque()
        self._full = threading.Lock()  # held only to count lost records
        self._wake = threading.Event()
        self._closing = False
        self.feed: Callable[[], None] = lambda: None  # the thread calls it before each flush
        self.memory_bytes = 0  # at the last flush that was due by time
        self._measure_at = 0.0  # PyTorch takes 150 µs for it on a GPU
        self.overflowed = 0  # records lost before the thread took them
        self._thread = threading.Thread(target=self._work, name="paceline-telemetry", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records lost so far."""
        return self.overflowed + self._outlet.lost

    def record(self, record: Record) -> None:
        """Sends a record with the next flush."""
        self._enqueue(record)

    def send(self, message: Message) -> None:
        """Sends a message now, after the records before it."""
        self._enqueue(message)
        self._wake.set()

    def mark(self) -> threading.Event:
        """Set once bus or spool has what was recorded and sent before, or it is lost."""
        passed = threading.Event()
        self._queue.append(passed)  # also into a full queue
        self._wake.set()
        return passed

    def _enqueue(self, item: Record | Message) -> None:
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
            if (now := time.monotonic()) >= self._measure_at:
                self.memory_bytes, self._measure_at = self._memory(), now + FLUSH_S
            self._outlet.retry()
            self.feed()
            for message in self._collect():
                if isinstance(message, threading.Event):
                    message.set()
                else:
                    self._outlet.deliver(message)
            if (seen := self._look()) is not None:
                self._outlet.deliver(seen)
            if closing:
                self._outlet.end()
                break
            self._outlet.tend(self.dropped)
            self._wake.wait(FLUSH_S)
            self._wake.clear()
        self._outlet.close(self.dropped)

    def _collect(self) -> list[Message | threading.Event]:
        """The queued messages, with the records of each kind joined to batches.

        Records of a kind keep their order, and no record passes a message.
        """
        messages: list[Message | threading.Event] = []
        steps: list[StepRecord] = []  # records of the newest batch of steps,
        metrics: list[MetricRecord] = []  # of metrics,
        rounds: list[RoundRecord] = []  # and of rounds
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, StepRecord):
                if not steps or len(steps) == BATCH_LIMIT:
                    steps = []
                    messages.append(StepBatch(steps))
                steps.append(item)
            elif isinstance(item, MetricRecord):
                if not metrics or len(metrics) == BATCH_LIMIT:
                    metrics = []
                    messages.append(MetricBatch(metrics))
                metrics.append(item)
            elif isinstance(item, RoundRecord):
                if not rounds or len(rounds) == BATCH_LIMIT:
                    rounds = []
                    messages.append(RoundBatch(rounds))
                rounds.append(item)
            else:
                steps, metrics, rounds = [], [], []
                messages.append(item)
        return messages


class Reporter:
    """Makes records of a rank's finished steps. For the thread that trains.

    The emitter's thread makes the records. That saves the thread that trains a few dozen µs a step.
    Two kinds of steps are read by the thread that trains: those of ranks that share batches, which
    exchange their times in the order of the steps; and those on a GPU, whose events no other thread
    may ask for while a CUDA graph is captured.

    Args:
        emitter: takes the records.
        attempt: of the run.
        rank: whose steps they are.
        by_size: losses are means over sizes, not over samples.
        times: of the ranks that share its batches; None: there is no other.
    """

    def __init__(
        self,
        emitter: Emitter,
        attempt: int,
        rank: int,
        by_size: bool = False,
        times: GroupTimes | None = None,
    ) -> None:
        self._times = times
        # Of the newest steps, while their groups' times may be on their way.
        self._sent: deque[tuple[RunningStep, StepRecord, PendingTimes]] = deque()
        self._emitter = emitter
        self._attempt = attempt
        self._rank = rank
        self._by_size = by_size
        self._seq = 0
        self._over: deque[RunningStep] = deque()
        self._reading = threading.Lock()  # held by the thread that reads steps
        self._failed: Exception | None = None  # what reading a step in the emitter's thread raised
        self._open: StepRecord | None = None  # of a step under whose number more may follow,
        self._sums: dict[str, tuple[float, float]] = {}  # and its metrics: weights, weighted values
        emitter.feed = self._read_finished

    def over(self, running: RunningStep) -> None:
        """Takes a finished step, which is read once the device is through with it."""
        self._over.append(running)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._times is not None or not running.on_cpu:
            with self._reading:
                while len(self._over) > 1 or (self._over and self._over[0].readable):
                    self._read(self._over.popleft())
        elif len(self._over) > _BEHIND:  # a dead connection blocks the emitter's thread
            with self._reading:
                self._read_all()

    def reported(self) -> threading.Event:
        """Reports all finished steps; set once bus or spool has them, or they are lost."""
        self.flush()
        return self._emitter.mark()

    def flush(self) -> None:
        """Reports all finished steps now."""
        with self._reading:
            self._read_all()
            self._report_sent(0)
            self._send_open()

    def _read_all(self) -> None:
        while self._over:
            self._read(self._over.popleft())

    def _read_finished(self) -> None:
        """Reads the steps that the device is through with. For the emitter's thread."""
        if self._times is not None:
            return
        with self._reading:
            while self._over and self._over[0].on_cpu and self._over[0].readable:
                try:
                    self._read(self._over.popleft())
                except Exception as error:  # the script shall hear of it, and not this thread end
                    logger.warning("a step could not be reported: %s", error)
                    self._failed = error

    def _read(self, running: RunningStep) -> None:
        record = self._record(running)
        if self._times is None:
            self._report(running, record)
            return
        sent = self._times.tell(record.data_s, record.compute_s)
        self._sent.append((running, record, sent))
        self._report_sent(1)

    def _report_sent(self, most: int) -> None:
        """Reports steps with the times of their group; so many may wait for those of other ranks.

        The others tell theirs when they end the step, which is about when this rank does.
        """
        while self._times is not None and len(self._sent) > most:
            running, record, sent = self._sent.popleft()
            self._report(running, self._times.slowest(record, sent))

    def _report(self, running: RunningStep, record: StepRecord) -> None:
        metrics = running.metrics()
        if self._open is not None and self._open.step == record.step:
            ett_s = record.ett_s if running.step.place else None  # of all micro-batches
            record = joined(self._open, record, ett_s, by_size=self._by_size)
        else:
            self._send_open()
        self._open = record
        weight = running.step.load if self._by_size else float(running.step.samples)
        for name, value in metrics.items():
            weights, total = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (weights + weight, total + weight * value)
        if not (running.step.shared or running.step.more):
            self._send_open()

    def _send_open(self) -> None:
        record, self._open = self._open, None
        if record is None:
            return
        if self._sums:
            self._send_metrics(record)
        self._emitter.record(msgspec.structs.replace(record, seq=self._seq))
        self._seq += 1

    def _send_metrics(self, record: StepRecord) -> None:
        """Sends the metrics of a step, before its record: then a complete step has them."""
        sums, self._sums = self._sums, {}
        values = {name: total / weight for name, (weight, total) in sums.items() if weight > 0}
        weight = record.load if self._by_size else float(record.samples)
        self._emitter.record(MetricRecord(self._attempt, self._rank, record.step, weight, values))

    def evaluated(self, evaluation: Evaluation) -> None:
        """Sends what the script measured on held-out data, after the steps before it."""
        if self._times is None:
            with self._reading:
                self._read_all()
        self._emitter.send(msgspec.structs.replace(evaluation, attempt=self._attempt))

    def _record(self, running: RunningStep) -> StepRecord:
        step = running.step
        compute_s, sync_s, loss = running.read()
        return StepRecord(
            attempt=self._attempt,
            rank=self._rank,
            seq=0,
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
            recompiles=running.recompiles,
        )


def joined(
    first: StepRecord, second: StepRecord, ett_s: float | None, *, by_size: bool
) -> StepRecord:
    """The record of two batches that a rank trained under the same step's number.

    Args:
        first, second: of one batch each.
        ett_s: expected compute time of both; None: it is not known.
        by_size: losses are means over sizes, not over samples.
    """
    loss = first.loss if second.loss is None else second.loss
    if first.loss is not None and second.loss is not None:
        weights = (first.load, second.load) if by_size else (first.samples, second.samples)
        loss = (weights[0] * first.loss + weights[1] * second.loss) / sum(weights)
    return msgspec.structs.replace(
        second,
        samples=first.samples + second.samples,
        load=first.load + second.load,
        data_s=first.data_s + second.data_s,
        compute_s=first.compute_s + second.compute_s,
        sync_s=first.sync_s + second.sync_s,
        step_s=first.step_s + second.step_s,
        ett_s=ett_s,
        loss=loss,
        squares=first.squares + second.squares,
        longest=max(first.longest, second.longest),
        recompiles=first.recompiles + second.recompiles,
    )


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
