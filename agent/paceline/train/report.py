"""Telemetry of a rank: its steps, rounds and metrics, which a background thread sends.

The loop passes finished steps to a `Reporter`, which makes records of them. The `Emitter`'s thread
sends the records through a `Sink`. Training never waits for that thread: if the thread's queue is
full, records are dropped, and their number is counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict

import msgspec

from paceline.train.mesh import GroupTimes, PendingTimes
from paceline.train.plan_shard import LocalStep
from paceline.train.sink import Sink
from paceline.train.sync.base import Round
from paceline.train.times_queue import TimesQueue
from paceline.train.timing import RunningStep
from paceline.wire import (
    Evaluation,
    LongPhase,
    Message,
    MetricBatch,
    MetricRecord,
    RoundBatch,
    RoundRecord,
    StepBatch,
    StepRecord,
)

logger = logging.getLogger(__name__)

# Interval at which records are sent. Each flush of a rank also wakes the bus and ingest, which
# share the ranks' cores on a small machine: with 0.05 s, steps take 25 µs longer there.
FLUSH_S = 0.1
# Maximum number of queued records. They take a few MB, and are enough for several minutes of
# training while a dead connection blocks the thread.
QUEUE_LIMIT = 20_000
BATCH_LIMIT = 1_000
# Maximum number of finished steps that wait for the emitter's thread. If there are more, the
# training thread makes their records.
_BEHIND = 1_000

Record = StepRecord | MetricRecord | RoundRecord


class Emitter:
    """Thread that sends messages through a `Sink`, and counts lost records.

    `record` and `send` never block. The training thread calls both methods; a thread that exchanges
    gradients may call `record`. Each message is delivered at least once, unless it is counted as
    lost. Records of one kind from one thread are sent in their order, and before the messages that
    the thread sends later; only an outage of the bus changes this order.

    Args:
        sink: gets all messages; None: the run has no control plane.
        memory: measures the memory in use, in bytes; the thread calls it every `FLUSH_S`.
        times: gets the records of steps; None: rank 0 does not plan.
        long_phase: returns a report of a long phase, or None; the thread calls it at every flush.
    """

    def __init__(
        self,
        sink: Sink | None,
        memory: Callable[[], int],
        times: TimesQueue | None = None,
        long_phase: Callable[[], LongPhase | None] = lambda: None,
    ) -> None:
        self._long_phase = long_phase
        self._sink = sink
        self._times = times
        self._memory = memory
        self._queue: deque[Record | Message | threading.Event] = deque()
        self._full = threading.Lock()
        self._wake = threading.Event()
        self._closing = False
        # Function that the thread calls before each flush.
        self.feed: Callable[[], None] = lambda: None
        self.memory_bytes = 0
        # Time of the next measurement. PyTorch takes 150 µs to measure memory on a GPU, so the
        # thread does not do it at every wake-up.
        self._measure_at = 0.0
        self.overflowed = 0
        self._thread = threading.Thread(target=self._work, name="paceline-telemetry", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Return the number of records lost so far."""
        return self.overflowed + (0 if self._sink is None else self._sink.lost)

    def record(self, record: Record) -> None:
        """Send a record with the next flush."""
        self._enqueue(record)

    def send(self, message: Message) -> None:
        """Send a message now, after the records before it."""
        self._enqueue(message)
        self._wake.set()

    def mark(self) -> threading.Event:
        """Return an event that is set once all earlier records and messages are stored, or lost."""
        passed = threading.Event()
        # The event is queued even if the queue is full, because the caller may wait for it.
        self._queue.append(passed)
        self._wake.set()
        return passed

    def _enqueue(self, item: Record | Message) -> None:
        if len(self._queue) < QUEUE_LIMIT:
            self._queue.append(item)
        else:
            # Two threads may count lost records at the same time.
            with self._full:
                self.overflowed += 1

    def close(self, timeout_s: float = 3.0) -> None:
        """Deliver the remaining messages and end the thread. Repeated calls are allowed."""
        self._closing = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "telemetry was not sent within %g s: its last records are lost", timeout_s
            )

    def _work(self) -> None:
        closing = False
        while not closing:
            closing = self._closing
            if self._sink is not None and (now := time.monotonic()) >= self._measure_at:
                self.memory_bytes, self._measure_at = self._memory(), now + FLUSH_S
            self.feed()
            messages = self._collect()
            if self._times is not None:
                self._send_times(self._times, messages)
            if self._sink is not None:
                self._send(self._sink, messages, closing)
            for message in messages:
                if isinstance(message, threading.Event):
                    message.set()
            if not closing:
                self._wake.wait(FLUSH_S)
                self._wake.clear()
        if self._sink is not None:
            self._sink.close(self.dropped)

    def _send_times(self, times: TimesQueue, messages: list[Message | threading.Event]) -> None:
        awaited = False
        for message in messages:
            if isinstance(message, StepBatch):
                times.add(message.records)
            awaited = awaited or isinstance(message, threading.Event)
        times.send(now=awaited)

    def _send(self, sink: Sink, messages: list[Message | threading.Event], closing: bool) -> None:
        sink.retry()
        for message in messages:
            if not isinstance(message, threading.Event):
                sink.deliver(message)
        if (report := self._long_phase()) is not None:
            sink.deliver(report)
        if closing:
            sink.end()
        else:
            sink.tend(self.dropped)

    def _collect(self) -> list[Message | threading.Event]:
        """Return the queued messages in order, with records put into batches of one kind."""
        messages: list[Message | threading.Event] = []
        steps: list[StepRecord] = []
        metrics: list[MetricRecord] = []
        rounds: list[RoundRecord] = []
        for _ in range(len(self._queue)):
            item = self._queue.popleft()
            if isinstance(item, StepRecord):
                if not steps or len(steps) == BATCH_LIMIT:
                    steps = []
                    messages.append(StepBatch(steps))
                steps.append(item)
            elif isinstance(item, MetricRecord):
                if not metrics or len(metrics) == BATCH_LIMIT:
                    # The record of a step must come after the step's metrics. So steps that are
                    # recorded from now on go into a new batch, after the batch of metrics.
                    metrics, steps = [], []
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
    """Maker of the records of a rank's finished steps.

    The emitter's thread makes the records, which saves the training thread a few dozen µs a step.
    In two cases the training thread makes them itself. Ranks of a group (`Session(mesh=…)`) must
    exchange their times in the order of the steps. On a GPU, no other thread may query a step's
    events while a CUDA graph is captured.

    Losses are means over sizes with `by_size`, otherwise over samples. `times` exchanges times with
    the other ranks of the group, which get the same batches; None: there are no such ranks.
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
        # The newest steps, for which the times of other ranks of the group may not have arrived.
        self._sent: deque[tuple[RunningStep, StepRecord, PendingTimes]] = deque()
        self._emitter = emitter
        self._attempt = attempt
        self._rank = rank
        self._by_size = by_size
        # The newest record's number, and the step whose further batches will be added to that
        # record; None: no further batches follow.
        self._seq = -1
        self._joins: int | None = None
        self._finished: deque[RunningStep] = deque()
        # Lock that a thread holds while it makes records of steps.
        self._reading = threading.Lock()
        # Error of the emitter's thread in making a record; the training thread raises it.
        self._failed: Exception | None = None
        # The record of a step to which further batches may be added. For each of the step's
        # metrics: the sum of the weights and the sum of the weighted values.
        self._open: StepRecord | None = None
        self._sums: dict[str, tuple[float, float]] = {}
        emitter.feed = self._read_finished

    def accept(self, running: RunningStep) -> None:
        """Accept a finished step; its record is made once the device has completed the step."""
        self._finished.append(running)
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed
        if self._times is not None or not running.on_cpu:
            with self._reading:
                while len(self._finished) > 1 or (self._finished and self._finished[0].readable):
                    self._read(self._finished.popleft())
        elif len(self._finished) > _BEHIND:
            with self._reading:
                self._read_all()

    def reported(self) -> threading.Event:
        """Report all finished steps; return an event that is set once they are stored, or lost."""
        self.flush()
        return self._emitter.mark()

    def flush(self) -> None:
        """Report all finished steps now."""
        with self._reading:
            self._read_all()
            self._report_sent(0)
            self._send_open()
            self._joins = None

    def _read_all(self) -> None:
        while self._finished:
            self._read(self._finished.popleft())

    def _read_finished(self) -> None:
        """Make the records of finished steps on a CPU. The emitter's thread calls this."""
        if self._times is not None:
            return
        with self._reading:
            # The times of a finished step on a CPU can be read without waiting.
            while self._finished and self._finished[0].on_cpu:
                try:
                    self._read(self._finished.popleft())
                except Exception as error:
                    logger.warning("a step could not be reported: %s", error)
                    self._failed = error

    def _read(self, running: RunningStep) -> None:
        record = self._record(running)
        if self._times is None:
            self._report(running, record)
            return
        sent = self._times.send(record.data_s, record.compute_s)
        self._sent.append((running, record, sent))
        self._report_sent(1)

    def _report_sent(self, most: int) -> None:
        while self._times is not None and len(self._sent) > most:
            running, record, sent = self._sent.popleft()
            self._report(running, self._times.slowest(record, sent))

    def _report(self, running: RunningStep, record: StepRecord) -> None:
        metrics = running.metrics()
        if self._open is not None and self._open.step == record.step:
            # Each micro-batch has the expected time of its whole step, so keep that time. Batches
            # that were taken over from other ranks have none, so record none for the step.
            ett_s = record.ett_s if running.step.micro_index else None
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
        self._emitter.record(record)

    def _send_metrics(self, record: StepRecord) -> None:
        sums, self._sums = self._sums, {}
        values = {name: total / weight for name, (weight, total) in sums.items() if weight > 0}
        weight = record.load if self._by_size else float(record.samples)
        self._emitter.record(MetricRecord(self._attempt, self._rank, record.step, weight, values))

    def evaluated(self, evaluation: Evaluation) -> None:
        """Send an evaluation, after the records of earlier steps."""
        if self._times is None:
            with self._reading:
                self._read_all()
        self._emitter.send(msgspec.structs.replace(evaluation, attempt=self._attempt))

    def _record(self, running: RunningStep) -> StepRecord:
        step = running.step
        compute_s, sync_s, loss = running.read()
        if step.step != self._joins:
            self._seq += 1
        self._joins = step.step if step.shared or step.more else None
        return StepRecord(
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
            recompiles=running.recompiles,
        )


def joined(
    first: StepRecord, second: StepRecord, ett_s: float | None, *, by_size: bool
) -> StepRecord:
    """Join the records of two batches that a rank trained under the same step's number.

    `ett_s` is the expected compute time of both batches together. Losses are means over sizes with
    `by_size`, otherwise over samples.
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
    """Maker of the records of a rank's rounds. Any thread may use it, one thread at a time."""

    def __init__(self, emitter: Emitter, attempt: int, rank: int) -> None:
        self._emitter = emitter
        self._attempt = attempt
        self._rank = rank
        self._seq = 0

    def accept(self, step: LocalStep, finished: Round) -> None:
        """Record a round that has just ended while the rank was in `step`."""
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
