"""From the telemetry stream into the store, and on to those who watch a run.

Commit first, then one bus transaction: publish to ``live(run)`` what the run's controller plans on,
name the run on `CHANGES` for those who watch it, acknowledge, delete. A crash between the two
repeats the batch, which changes nothing in the store and publishes it for the first time. So every
record is stored once and appears in the live stream, there twice only when another ingest took over
from one that was stuck, not dead. A batch is one entry of a run's live stream, since thousands of
ranks send one record each. A bus or database that is away stops ingest, not its producers: entries
wait on the bus.

A large Hello comes in parts, and takes seconds to put together. A thread of its own does that
(`assembly`), while the entry of the part that completed it is not acknowledged: after a crash, it
comes again, and completes the Hello again.

No message stops the others, and none is stored that `checks` refuses. A message that cannot be
read, stored or published is rejected: `requests.rejected` keeps the reason. When a batch
fails and the database answers, its halves are tried by themselves, until the message is alone that
fails. An entry that was delivered `_OFTEN` times (ingest failed or was killed while it had it) is
tried alone, and quarantined when that failed `_TRIES_ALONE` times.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import redis
from redis.client import Pipeline

from paceline.core.outage import Outage
from paceline.wire import (
    CHANGES,
    CHANGES_LENGTH,
    INGEST_GROUP,
    Adopted,
    Committed,
    DataEpoch,
    Evaluation,
    Fallback,
    Hello,
    HelloPart,
    LongPhase,
    Message,
    MetricBatch,
    NodeState,
    RoundBatch,
    RunChanged,
    RunState,
    StepBatch,
    WireError,
    encode,
    live,
    run_telemetry,
)
from paceline.wire.bus import connect
from paceline_backend import backends
from paceline_backend.control.assembly import Assembly
from paceline_backend.control.checks import Checks, problem
from paceline_backend.control.consumer import CLAIM_IDLE_S, Consumer, Entry, in_order
from paceline_backend.control.writers import Received, Writers, ends
from paceline_backend.requests import rejected, streams
from paceline_backend.server import tracing
from paceline_backend.store import (
    Store,
    StoreError,
    StoreRefusedError,
    hellos,
    nodes,
    runs,
    telemetry,
)

_BATCH = 4_000  # messages
_AT_ONCE_BYTES = 8 * 2**20  # of the messages that are decoded and stored together
_LIVE_S = 60.0  # how long live streams keep an entry: a controller may lag so far behind
_SHARE = 2.0  # times what a batch takes, from one batch to the next: fewer batches cost less,
_LATEST_S = 0.1  # but no row waits for longer
_TRIES = 3  # of a message alone, where nobody knows why writing fails
_AGAIN_S = 0.1  # between them
_OFTEN = 3  # deliveries of an entry that was not acknowledged
_TRIES_ALONE = 3
_TRIED = "paceline:tried-alone"  # how often each entry was; on the bus, as ingest may be killed
_TRIED_S = 86_400
_MOST_UNKNOWN = 1_000  # runs that are named in the log
_TAKEN = (
    *(StepBatch, MetricBatch, RoundBatch, Evaluation, Adopted, Fallback, LongPhase),
    *(DataEpoch, Hello, HelloPart, RunState, NodeState),
)
_PLANNED_ON = (Hello, StepBatch, Adopted, RunState)  # what controllers hear of
_SHOWN = (Hello, Adopted, Fallback, Evaluation, RunState)  # what open pages hear of, beside steps
_HOLD_S = 30.0  # longest: a run that reports for ever after its end does not stay
_part = msgspec.msgpack.Decoder(HelloPart)
_BLOCK_S = 0.25  # how long `Ingest.run` may take to notice that it should stop

logger = logging.getLogger(__name__)


@dataclass
class IngestStats:
    """What one ingest has done; written by its thread, read by any."""

    rows: int = 0  # records of worker steps, repeated ones included
    batches: int = 0  # transactions
    last_commit_at: float | None = None  # Unix time
    lag: int = 0  # entries on the streams that it reads, when it looked last: twice a second


@dataclass(slots=True)
class _Item:
    """An entry, and what is known about it."""

    entry: Entry
    run: str
    message: Message | None
    reason: str | None = None  # why it is rejected
    stale: bool = False  # a heartbeat that says nothing about now
    tries: int = 1  # how often it was tried
    planned: bool = False  # a controller plans the run
    step: int | None = None  # the run's earliest step that is new with the item's batch
    packed: hellos.PackedHello | None = None  # of a Hello whose parts are stored
    completes: bool = False  # a part: the run has the whole Hello now


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
        claim_idle_s: float = CLAIM_IDLE_S,
    ) -> None:
        self.stats = IngestStats()
        self._store = store
        self._checks = Checks(store)
        self._bus_url = bus_url
        self._name = name
        self._linger_s = linger_s
        self._claim_idle_s = claim_idle_s
        self._unknown_runs: set[str] = set()
        self._writers = Writers(store)
        # More telemetry waits than a batch holds: roll-ups can wait, and controllers plan less.
        self.behind = False
        self._complete: dict[hellos.HelloKey, str] = {}  # by the batch; their runs
        self._assembly = Assembly(store)
        self._wholes: dict[hellos.HelloKey, _Item] = {}  # Hellos to put together: their last parts
        self._repeated = False  # the batch was delivered before
        self._blameless: Counter[str] = Counter()  # tries that the bus ended, by entry
        self._held: list[Received] = []  # ends of runs whose own streams hold more
        self.on_step: Callable[[], None] = lambda: None  # called after each batch, and while idle

    def run(self, stop: threading.Event) -> None:
        """Works until `stop` is set. Waits out a bus or a database that is away."""
        with closing(connect(self._bus_url, keep=True)) as client:
            consumer = Consumer(client, (), INGEST_GROUP, self._name, self._claim_idle_s)
            outage = Outage(logger, "ingest waits for the bus", "ingest goes on: the bus is back")
            database = self._database_outage()
            while not stop.is_set():
                began = time.monotonic()
                try:
                    count = self._step(client, consumer, stop)
                except redis.RedisError as error:
                    self._forget(consumer)
                    stop.wait(outage.failed(error))
                    continue
                except StoreError as error:
                    self._forget(consumer)
                    self._wait_for_database(database, error, stop)
                    continue
                except _StoppedError:
                    return
                outage.over()
                database.over()
                self.on_step()
                if count and not self.behind:
                    took_s = time.monotonic() - began
                    period_s = max(self._linger_s, min(_SHARE * took_s, _LATEST_S))
                    stop.wait(period_s - took_s)

    def _wait_for_database(self, outage: Outage, error: StoreError, stop: threading.Event) -> None:
        """Wait until the database answers: entries that are read meanwhile would count as tried."""
        while not stop.wait(outage.failed(error)):
            try:
                telemetry.write(self._store, [])
            except StoreError as again:
                error = again
            else:
                return

    def _step(self, client: redis.Redis, consumer: Consumer, stop: threading.Event) -> int:
        """Handles one batch; returns how many entries it had."""
        if self._writers.due():
            names = self._writers.streams()
            consumer.follow(names)
            self.stats.lag = streams.entries(client, names)
        held = [each.entry for each in self._held]
        kept = consumer.keep([*held, *(each.entry for each in self._wholes.values())])
        self._held = [each for each in self._held if each.entry[:2] in kept]
        self._wholes = {n: each for n, each in self._wholes.items() if each.entry[:2] in kept}
        self._take_wholes(client, stop)
        entries = consumer.read(_BATCH, _BLOCK_S)
        self.behind = bool(entries) and bool(consumer.unread)
        if not entries and not self._held:
            return 0
        self._repeated = consumer.repeated
        often = consumer.often(entries, _OFTEN) if consumer.repeated else {}
        rest = [entry for entry in entries if entry[:2] not in often]
        count = len(often)
        for part in in_order(rest, _AT_ONCE_BYTES) or [[]]:
            with tracing.now().batch(len(part)):
                count += self._handle(client, part, stop)
        suspects = [entry for entry in entries if entry[:2] in often]
        if suspects:
            self._handle_alone(client, suspects, often, stop)
        return count

    def _handle_alone(
        self,
        client: redis.Redis,
        suspects: Sequence[Entry],
        deliveries: Mapping[tuple[str, bytes], int],
        stop: threading.Event,
    ) -> None:
        """Handle entries, one of which may be what ingest fails at; the least tried come first."""
        self._take_wholes(client, stop, wait=True)
        names = [f"{entry.stream} {entry.number.decode()}" for entry in suspects]
        for name, times in self._blameless.items():
            client.hincrby(_TRIED, name, -times)
        self._blameless.clear()
        tried: Any = client.hmget(_TRIED, names)
        triples = zip((int(tries or 0) for tries in tried), names, suspects, strict=True)
        for tries, name, entry in sorted(triples, key=lambda triple: triple[0]):
            if tries >= _TRIES_ALONE:
                self._forget_hello(entry)
                run = entry.fields.get(b"run", b"").decode(errors="replace")
                times = deliveries[entry[:2]]
                reason = f"it was delivered {times} times, and each time ingest failed or ended"
                self._settle(client, [_Item(entry, run, None, reason, tries=times)], set())
            else:
                client.hincrby(_TRIED, name, 1)
                client.expire(_TRIED, _TRIED_S)
                try:
                    self._handle(client, [entry], stop)
                    self._take_wholes(client, stop, wait=True)
                except (StoreError, _StoppedError):  # the database's fault, or an operator's wish
                    client.hincrby(_TRIED, name, -1)
                    raise
                except (redis.ConnectionError, redis.TimeoutError):
                    if not _answers(client):  # else the bus may have refused this entry
                        self._blameless[name] += 1
                    raise
            client.hdel(_TRIED, name)

    def _forget_hello(self, entry: Entry) -> None:
        """Delete the Hello whose part an entry is, so that no other part has it put together."""
        try:
            part = _part.decode(entry.fields.get(b"data", b""))
        except (ValueError, RecursionError):
            return
        [received] = self._writers.receive([entry])
        if received.reason is not None:
            return
        with self._store.write() as connection, suppress(runs.UnknownRunError):
            key = runs.key_of(connection, received.run)
            hellos.forget(connection, hellos.HelloKey(key, part.attempt, part.hello))

    def _handle(self, client: redis.Redis, entries: Sequence[Entry], stop: threading.Event) -> int:
        received = [*self._writers.receive(entries), *self._held]
        items = [_item(each) for each in self._whole(client, received)]
        _mark_stale(client, items)
        good = self._check(items)
        self._complete = {}
        ended = self._write(good, stop) if good else set()
        rest = self._without_wholes(items)
        if rest:
            self._settle(client, rest, ended)
        return len(items)

    def _whole(self, client: redis.Redis, received: list[Received]) -> list[Received]:
        """Without the ends of runs whose own streams hold more: an end comes last.

        What is stored leaves its stream. So more may be there that nobody has read, or that another
        worker has read and not stored, or read and died. An end that is held is not acknowledged:
        whoever takes over from a worker that died gets the end, and holds it in turn.
        """
        over = [each for each in received if ends(each)]
        self._held = []
        if not over:
            return received
        own = [run_telemetry(each.run) for each in over]
        # The last part of a Hello stays on the stream until the Hello is taken in.
        counts = Counter(
            each.entry.stream for each in received if not isinstance(each.message, HelloPart)
        )
        sizes = dict(zip(own, streams.lengths(client, own), strict=True))
        now = time.monotonic()
        self._held = [
            each
            for each, stream in zip(over, own, strict=True)
            if sizes[stream] > counts[stream] and now < each.came_at + _HOLD_S
        ]
        held = {id(each) for each in self._held}
        return [each for each in received if id(each) not in held]

    def _forget(self, consumer: Consumer) -> None:
        """Everything that is not acknowledged is read again."""
        self._held = []
        self._wholes = {}
        consumer.reset()

    def _database_outage(self) -> Outage:
        name = self._store.name
        return Outage(logger, f"ingest waits for {name}", f"ingest goes on: {name} is back")

    def _check(self, items: list[_Item], *, sound: bool = False) -> list[_Item]:
        """Marks what may not be what it says; the others.

        Args:
            items: to check.
            sound: see `Checks.reasons`.

        Raises:
            StoreError: or one of its kinds.
        """
        readable = [item for item in items if item.reason is None and item.message is not None]
        messages = [(item.run, item.message) for item in readable if item.message is not None]
        reasons = self._checks.reasons(messages, sound=sound)
        for item, reason in zip(readable, reasons, strict=True):
            item.reason = reason
        self._report(self._checks.unknown(messages))
        return [item for item in readable if item.reason is None]

    def _write(self, items: list[_Item], stop: threading.Event) -> set[str]:
        """Commits items, marks those that cannot be, and returns which of their runs are over.

        Raises:
            _StoppedError: before the database answered.
        """
        kept = [item for item in items if item.message is not None and not item.stale]
        messages = [(item.run, item.message) for item in kept if item.message is not None]
        packed = {place: item.packed for place, item in enumerate(kept) if item.packed is not None}
        outage = self._database_outage()
        failures = 0
        while True:
            try:
                written = telemetry.write(
                    self._store, messages, roll_up=not self.behind, packed=packed
                )
            except Exception as error:
                pause_s = _AGAIN_S
                if not self._at_fault(error):
                    pause_s = outage.failed(_words(error))
                elif len(items) > 1:
                    return self._write_apart(items, stop)
                elif isinstance(error, StoreRefusedError) or (failures := failures + 1) == _TRIES:
                    items[0].reason, items[0].tries = _words(error), max(1, failures)
                    return set()
                if stop.wait(pause_s):
                    raise _StoppedError from error
            else:
                outage.over()
                return self._written(items, written)

    def _write_apart(self, items: list[_Item], stop: threading.Event) -> set[str]:
        """Commits items that cannot be committed together; else as `_write`."""
        for item in items:
            item.reason = None if item.message is None else problem(item.message)
        good = [item for item in items if item.reason is None]
        if len(good) < len(items):
            return self._write(good, stop) if good else set()
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
        self._complete |= {named: run for run, named in written.complete}
        planned = {
            run for run, backend in written.backends.items() if not backends.plans_itself(backend)
        }
        for item in items:
            item.planned = item.run in planned
            item.step = written.steps.get(item.run)
            if item.run in written.unknown and not isinstance(item.message, NodeState):
                item.reason = f"unknown run {item.run!r}"
        if self._repeated:  # perhaps ingest ended before it said that the run has its Hello
            for item in items:
                item.completes = isinstance(item.message, HelloPart) and item.run in written.again
        self._report(written.unknown)
        return set(written.ended)

    def _without_wholes(self, items: list[_Item]) -> list[_Item]:
        """Hold back the last part of each Hello that is complete; return the other items."""
        for named, run in self._complete.items():
            if named not in self._wholes:
                self._wholes[named] = next(
                    item
                    for item in reversed(items)
                    if item.run == run
                    and isinstance(item.message, HelloPart)
                    and (item.message.attempt, item.message.hello) == named[1:]
                )
        held = {id(item) for item in self._wholes.values()}
        return [item for item in items if id(item) not in held]

    def _take_wholes(
        self, client: redis.Redis, stop: threading.Event, *, wait: bool = False
    ) -> None:
        """Take in Hellos whose parts are all stored, like Hellos that came whole.

        Args:
            client: of the bus.
            stop: see `run`.
            wait: until all are taken in.

        Raises:
            StoreError: or one of its kinds.
        """
        for named, item in list(self._wholes.items()):
            ended: set[str] = set()
            try:
                ranks = self._checks.most_ranks(item.run)
                hello = self._assembly.hello(named, ranks, wait=wait)
                if hello is None:
                    return
                ended = self._take_whole(named, item, hello, stop)
            except WireError as error:
                item.reason = str(error)
            if item.reason is not None:
                with self._store.write() as connection:
                    hellos.forget(connection, named)
            del self._wholes[named]
            self._settle(client, [item], ended)

    def _take_whole(
        self, named: hellos.HelloKey, item: _Item, hello: Hello, stop: threading.Event
    ) -> set[str]:
        """Commit a Hello that was put together; mark its last part, and return as `_write`."""
        assert isinstance(item.message, HelloPart)
        packed = hellos.PackedHello(named.digest, item.message.of)
        whole = _Item(item.entry, item.run, hello, packed=packed)
        ended = self._write([whole], stop) if self._check([whole], sound=True) else set()
        item.reason, item.tries = whole.reason, whole.tries
        item.planned, item.step = whole.planned, whole.step
        item.completes = whole.reason is None
        return ended

    def _report(self, unknown: Iterable[str]) -> None:
        for run in unknown:
            if run not in self._unknown_runs and len(self._unknown_runs) < _MOST_UNKNOWN:
                self._unknown_runs.add(run)
                logger.warning("telemetry of the unknown run %r is rejected", run[:200])

    def _settle(self, client: redis.Redis, items: list[_Item], ended: set[str]) -> None:
        """Publish, reject and acknowledge messages in one transaction."""
        pipeline = client.pipeline(transaction=True)
        bad = [item for item in items if item.reason is not None]
        for item in bad:
            rejected.add(pipeline, *item.entry, item.reason or "", item.tries)
        _publish(client, pipeline, [item for item in items if item.reason is None])
        for run in {
            each.run for each in items if each.completes or isinstance(each.message, Hello)
        } - ended:
            streams.keep(pipeline, run)  # a run that goes on: they were to expire
        for run in ended:
            streams.expire(pipeline, run)
        numbers: dict[str, list[bytes]] = {}
        for item in items:
            numbers.setdefault(item.entry.stream, []).append(item.entry.number)
        for stream, of_stream in numbers.items():
            pipeline.xack(stream, INGEST_GROUP, *of_stream)
            pipeline.xdel(stream, *of_stream)
        answers = pipeline.execute()  # the first are the numbers of the notes
        notes = zip(bad, answers, strict=False)
        rejected.bound(client, [(item.entry.stream, number) for item, number in notes])


def _publish(client: redis.Redis, pipeline: Pipeline, items: Sequence[_Item]) -> None:
    """Tell controllers and open pages of what is stored, as parts of a transaction."""
    committed: dict[str, list[msgspec.Raw]] = {}
    changed: dict[str, int | None] = {}
    for item in items:
        if item.completes:  # a Hello too large for the live stream
            data = encode(RunChanged(), item.run)[b"data"]
        else:
            data = item.entry.fields.get(b"data", b"")
        if item.planned and (item.completes or isinstance(item.message, _PLANNED_ON)):
            committed.setdefault(item.run, []).append(msgspec.Raw(data))
        if item.completes or item.step is not None or isinstance(item.message, _SHOWN):
            steps = [step for step in (changed.get(item.run), item.step) if step is not None]
            changed[item.run] = min(steps, default=None)
    if committed:
        seconds, _ = client.time()
        oldest = f"{1_000 * (seconds - _LIVE_S):.0f}-0"
        for run, messages in committed.items():
            entry: Any = encode(Committed(messages), run)
            pipeline.xadd(live(run), entry, minid=oldest)
    if changed:
        fields: Any = {run: b"" if step is None else b"%d" % step for run, step in changed.items()}
        pipeline.xadd(CHANGES, fields, maxlen=CHANGES_LENGTH)


def _words(error: Exception) -> str:
    if isinstance(error, StoreError | redis.RedisError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _item(received: Received) -> _Item:
    item = _Item(received.entry, received.run, received.message, received.reason)
    if item.reason is None and not isinstance(item.message, _TAKEN):
        item.reason = f"{type(item.message).__name__} is not telemetry"
    return item


def _mark_stale(client: redis.Redis, items: list[_Item]) -> None:
    """Marks heartbeats that lay on the bus for so long that their nodes may be dead by now.

    Both times are the bus's: an entry's number begins with the time at which it came.
    """
    heartbeats = [item for item in items if isinstance(item.message, NodeState)]
    if not heartbeats:
        return
    seconds, microseconds = client.time()
    now_ms = 1_000 * seconds + microseconds // 1_000
    for item in heartbeats:
        item.stale = now_ms - int(item.entry.number.partition(b"-")[0]) > 1_000 * nodes.ALIVE_S


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


class _StoppedError(Exception):
    """`Ingest.run` was asked to stop while it waited."""
