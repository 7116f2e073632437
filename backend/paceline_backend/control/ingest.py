"""Ingest: moves telemetry from the bus into the store, and on to controllers and open pages.

Ingest commits first. One bus transaction then publishes to ``live(run)`` the messages that the
run's controller needs, names the run on `CHANGES` for open pages, and acknowledges and deletes the
entries. After a crash between commit and publication, the batch is delivered again: the store does
not change, and the messages are published for the first time. So every record is stored once and
appears in the live stream. A record appears there twice only if another ingest took over from an
ingest that was stuck, not dead. All messages of a batch that belong to a run become a single entry
of its live stream, because thousands of ranks send one record each. An outage of the bus or the
database stops ingest but not the ranks: their entries stay on the bus.

A large Hello arrives in parts, can have hundreds of megabytes, and takes seconds to assemble. A
separate thread assembles it (`_Assembly`). Ingest does not acknowledge the part that completed the
Hello until the Hello is stored, so that after a crash this part is delivered again and completes
the Hello again.

No message can block others, and ingest stores no message that `checks` refuses. A message that
cannot be read, stored or published is rejected, and `requests.rejected` keeps the reason. When a
batch fails while the database answers, ingest bisects it until it finds the message that fails. An
entry that was delivered `_OFTEN` times, because ingest failed or was killed while handling it, is
tried alone, and quarantined after `_TRIES_ALONE` failures.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from paceline.wire.parts import joined
from paceline_backend import backends
from paceline_backend.control.checks import Checks, defect
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

_MOST_BATCH_ENTRIES = 4_000  # messages
# Maximum size of the messages that are decoded and stored together.
_AT_ONCE_BYTES = 2 * 2**20
# Lifetime of entries on live streams, and so the maximum lag of a controller.
_LIVE_S = 60.0
# Minimum time from the start of a batch to the start of the next, in multiples of the batch's
# processor time. Fewer and larger batches are cheaper, but their entries wait longer. The time for
# which a batch waits for a disk, the database or the bus does not count: after a long wait, the
# next batch is large anyway, and a pause would only make its entries older.
_BATCH_SPACING = 2.0
# Bounds of the minimum time between the starts of two batches, in seconds.
_PERIOD_S = (0.01, 0.1)
# If storing a single message fails for an unknown reason: number of tries, and pause between them.
_WRITE_TRIES = 3
_WRITE_RETRY_S = 0.1
# An entry that was delivered this many times without being acknowledged is tried alone.
_OFTEN = 3
_TRIES_ALONE = 3
# Key of the hash that maps entries to their numbers of tries. This hash is on the bus, because a
# bad entry can kill ingest.
_TRIED = "paceline:tried-alone"
_TRIED_S = 86_400
_MOST_UNKNOWN = 1_000
_TAKEN = (
    *(StepBatch, MetricBatch, RoundBatch, Evaluation, Adopted, Fallback, LongPhase),
    *(DataEpoch, Hello, HelloPart, RunState, NodeState),
)
# Messages that controllers receive unchanged. Instead of a Hello they receive a `RunChanged`.
_PLANNED_ON = (StepBatch, Adopted, RunState)
# Messages after which open pages refresh. Pages also refresh after Hellos and steps.
_SHOWN = (Adopted, Fallback, Evaluation, RunState)
# Maximum time for which a run's end is held back. Without a limit, a run that never stops reporting
# would never end.
_HOLD_S = 30.0
_part = msgspec.msgpack.Decoder(HelloPart)
# Maximum delay after which `Ingest.run` notices that it should stop, or that there are new streams.
# `_IDLE_BLOCK_S` applies once nothing but heartbeats of nodes has arrived for `_IDLE_AFTER_S`.
_BLOCK_S, _IDLE_BLOCK_S = 0.25, 1.0
_IDLE_AFTER_S = 30.0
# Maximum pause between two queries for new streams while ingest is idle and nothing has changed.
_FOLLOW_S = 10.0

logger = logging.getLogger(__name__)


@dataclass
class IngestStats:
    """Counters of one ingest, which the thread of ingest writes and any thread may read."""

    # Number of stored step records, one per step and rank, including repeated records.
    rows: int = 0
    # Number of committed transactions.
    batches: int = 0
    last_commit_at: float | None = None  # Unix time
    # Number of entries on all streams that ingest reads, updated twice a second, or every
    # `_FOLLOW_S` while nothing changes.
    lag: int = 0


@dataclass(slots=True)
class _Item:
    entry: Entry
    run: str
    message: Message | None
    # Reason why the entry is rejected, or None.
    reason: str | None = None
    # True if the entry is a heartbeat that is too old to show that its node is alive.
    stale: bool = False
    tries: int = 1
    # True if a controller plans the run and therefore needs the message.
    planned: bool = False
    # The earliest step of the run that the item's batch may have completed.
    step: int | None = None
    # For a Hello: its encoded form.
    packed: hellos.PackedHello | None = None
    # True if the entry is the part that completed the run's Hello.
    completes: bool = False

    @property
    def introduces(self) -> bool:
        """True if the entry is a Hello, or the part that completed a Hello."""
        return self.completes or isinstance(self.message, Hello)


class Ingest:
    """Ingest of all telemetry streams. Several may run at once, each in its own thread.

    Args:
        name: name of this consumer: unique among running ones, and preferably the same after a
            restart.
        claim_idle_s: seconds after which this ingest claims the entries of a consumer that
            acknowledges nothing.
    """

    def __init__(
        self,
        store: Store,
        bus_url: str,
        name: str,
        *,
        claim_idle_s: float = CLAIM_IDLE_S,
    ) -> None:
        self.stats = IngestStats()
        self._store = store
        self._checks = Checks(store)
        self._bus_url = bus_url
        self._name = name
        self._claim_idle_s = claim_idle_s
        self._unknown_runs: set[str] = set()
        self._writers = Writers(store)
        # True if more telemetry is on the bus than a batch holds. Meanwhile, roll-ups are
        # postponed, and controllers plan less often.
        self.behind = False
        # The run of each Hello that the current batch completed.
        self._complete: dict[hellos.HelloKey, str] = {}
        self._assembly = _Assembly(store)
        # For each Hello that must still be assembled: the item of its last part.
        self._last_parts: dict[hellos.HelloKey, _Item] = {}
        # True if the current batch was delivered before.
        self._repeated = False
        # Time of the latest acknowledgement, in Unix seconds by the bus's clock.
        self._settled_at = 0.0
        # By entry: number of tries that failed because of the bus.
        self._bus_failures: Counter[str] = Counter()
        # Messages about the ends of runs. Each is held back until all other entries of the run's
        # own stream are stored or in the same batch, but for at most `_HOLD_S`.
        self._held: list[Received] = []
        self._idle_at = time.monotonic() + _IDLE_AFTER_S
        # The newest entry on `CHANGES` when an idle ingest last looked for new streams.
        self._newest: bytes | None = None
        self._follow_at = 0.0
        # Function that ingest calls after each batch, and regularly while idle.
        self.on_step: Callable[[], None] = lambda: None

    def run(self, stop: threading.Event) -> None:
        """Ingest until `stop` is set; during outages of bus or database, wait and retry."""
        with closing(connect(self._bus_url, keep=True)) as client:
            consumer = Consumer(client, (), INGEST_GROUP, self._name, self._claim_idle_s)
            outage = Outage(logger, "ingest waits for the bus", "ingest continues: the bus is back")
            database = self._database_outage()
            while not stop.is_set():
                began, used_s = time.monotonic(), time.thread_time()
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
                outage.succeeded()
                database.succeeded()
                self.on_step()
                if count and not self.behind:
                    used_s = time.thread_time() - used_s
                    shortest_s, longest_s = _PERIOD_S
                    period_s = max(shortest_s, min(_BATCH_SPACING * used_s, longest_s))
                    stop.wait(began + period_s - time.monotonic())

    def _wait_for_database(self, outage: Outage, error: StoreError, stop: threading.Event) -> None:
        # Do not read entries meanwhile, because each delivery of an entry counts as a try.
        while not stop.wait(outage.failed(error)):
            try:
                telemetry.write(self._store, [])
            except StoreError as again:
                error = again
            else:
                return

    def _step(self, client: redis.Redis, consumer: Consumer, stop: threading.Event) -> int:
        idle = time.monotonic() > self._idle_at
        if self._writers.due() and (not idle or self._has_new_streams(client)):
            names = self._writers.streams()
            consumer.follow(names)
            self.stats.lag = streams.entries(client, names)
            self._follow_at = time.monotonic() + _FOLLOW_S
            # If the query for streams is still due, the database did not answer. Forget the newest
            # entry, so that the next call of `_step` queries again.
            if self._writers.due():
                self._newest = None
        held = [each.entry for each in self._held]
        kept = consumer.keep([*held, *(each.entry for each in self._last_parts.values())])
        self._held = [each for each in self._held if each.entry[:2] in kept]
        self._last_parts = {
            n: each for n, each in self._last_parts.items() if each.entry[:2] in kept
        }
        self._store_hellos(client, stop)
        entries = consumer.read(_MOST_BATCH_ENTRIES, _IDLE_BLOCK_S if idle else _BLOCK_S)
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

    def _has_new_streams(self, client: redis.Redis) -> bool:
        """Return True if nodes or runs may have got streams since the last call.

        The web process adds an entry to `CHANGES` after it has given a node or a run a session.
        """
        entries: Any = client.xrevrange(CHANGES, count=1)
        newest, before = entries[0][0] if entries else b"", self._newest
        self._newest = newest
        return newest != before or time.monotonic() >= self._follow_at

    def _handle_alone(
        self,
        client: redis.Redis,
        suspects: Sequence[Entry],
        deliveries: Mapping[tuple[str, bytes], int],
        stop: threading.Event,
    ) -> None:
        """Handle entries that may make ingest fail, one by one, those with fewest tries first."""
        self._store_hellos(client, stop, wait=True)
        names = [f"{entry.stream} {entry.number.decode()}" for entry in suspects]
        for name, times in self._bus_failures.items():
            client.hincrby(_TRIED, name, -times)
        self._bus_failures.clear()
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
                    self._store_hellos(client, stop, wait=True)
                # A database error or a stop is not the entry's fault, so the try does not count.
                except (StoreError, _StoppedError):
                    client.hincrby(_TRIED, name, -1)
                    raise
                except (redis.ConnectionError, redis.TimeoutError):
                    # If the bus answers, it may have closed the connection because of this entry,
                    # so the try counts.
                    if not _answers(client):
                        self._bus_failures[name] += 1
                    raise
            client.hdel(_TRIED, name)

    def _forget_hello(self, entry: Entry) -> None:
        """Delete the Hello of which an entry is a part, so that no other part can complete it."""
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
        items = [_item(each) for each in self._hold_back_ends(client, received)]
        if any(not isinstance(item.message, NodeState) for item in items):
            self._idle_at = time.monotonic() + _IDLE_AFTER_S
        _mark_stale(client, items)
        good = self._check(items)
        self._complete = {}
        ended = self._write(good, stop) if good else set()
        rest = self._without_last_parts(items)
        if rest:
            self._settle(client, rest, ended)
        return len(items)

    def _hold_back_ends(self, client: redis.Redis, received: list[Received]) -> list[Received]:
        """Hold back messages that end a run whose stream has more entries; return other messages.

        The end of a run must be stored last. Stored entries are deleted from their stream. An entry
        that is still there has not been read, or a worker has read it but has not stored it yet. A
        message that is held back is not acknowledged, so the successor of a worker that died
        receives it.
        """
        over = [each for each in received if ends(each)]
        self._held = []
        if not over:
            return received
        own = [run_telemetry(each.run) for each in over]
        # Do not count parts of Hellos: the last part stays on the stream until the Hello is stored,
        # and the run's end must wait for that.
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
        """Reset the consumer, so that all entries that are not acknowledged are read again."""
        self._held = []
        self._last_parts = {}
        consumer.reset()

    def _database_outage(self) -> Outage:
        name = self._store.name
        return Outage(logger, f"ingest waits for {name}", f"ingest continues: {name} is back")

    def _check(self, items: list[_Item], *, sound: bool = False) -> list[_Item]:
        """Give implausible items a `reason`, and return the plausible items.

        For `sound` see `Checks.reasons`.
        """
        readable = [item for item in items if item.reason is None and item.message is not None]
        messages = [(item.run, item.message) for item in readable if item.message is not None]
        reasons = self._checks.reasons(messages, sound=sound)
        for item, reason in zip(readable, reasons, strict=True):
            item.reason = reason
        self._report(self._checks.unknown(messages))
        return [item for item in readable if item.reason is None]

    def _write(self, items: list[_Item], stop: threading.Event) -> set[str]:
        """Commit items, give those that cannot be stored a `reason`, and return the ended runs.

        Raises:
            _StoppedError: `stop` was set before the database answered.
        """
        kept = [item for item in items if item.message is not None and not item.stale]
        messages = [(item.run, item.message) for item in kept if item.message is not None]
        for item in kept:
            # Pack Hellos only now, because only now they have been checked.
            if isinstance(item.message, Hello) and item.packed is None:
                item.packed = hellos.pack(item.message)
        packed = {place: item.packed for place, item in enumerate(kept) if item.packed is not None}
        outage = self._database_outage()
        failures = 0
        while True:
            try:
                written = telemetry.write(
                    self._store,
                    messages,
                    roll_up=not self.behind,
                    packed=packed,
                    assembling=self._last_parts,
                )
            except Exception as error:
                pause_s = _WRITE_RETRY_S
                if not self._at_fault(error):
                    pause_s = outage.failed(_words(error))
                elif len(items) > 1:
                    return self._write_apart(items, stop)
                elif (
                    isinstance(error, StoreRefusedError)
                    or (failures := failures + 1) == _WRITE_TRIES
                ):
                    items[0].reason, items[0].tries = _words(error), max(1, failures)
                    return set()
                if stop.wait(pause_s):
                    raise _StoppedError from error
            else:
                outage.succeeded()
                return self._written(items, written)

    def _write_apart(self, items: list[_Item], stop: threading.Event) -> set[str]:
        """Commit items that cannot be committed together; see `_write`.

        Give items with a defect a `reason` and commit the items without a defect. If no item has a
        defect, commit the first half of the items, then the second half.
        """
        for item in items:
            item.reason = None if item.message is None else defect(item.message)
        good = [item for item in items if item.reason is None]
        if len(good) < len(items):
            return self._write(good, stop) if good else set()
        half = len(items) // 2
        return self._write(items[:half], stop) | self._write(items[half:], stop)

    def _at_fault(self, error: Exception) -> bool:
        """Return True if the messages caused the error, not the database."""
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
        # Ingest may have died before it announced the Hello, so announce it again.
        if self._repeated:
            for item in items:
                item.completes = isinstance(item.message, HelloPart) and item.run in written.again
        self._report(written.unknown)
        return set(written.ended)

    def _without_last_parts(self, items: list[_Item]) -> list[_Item]:
        """Hold back the last part of each complete Hello, and return the other items."""
        for named, run in self._complete.items():
            if named not in self._last_parts:
                self._last_parts[named] = next(
                    item
                    for item in reversed(items)
                    if item.run == run
                    and isinstance(item.message, HelloPart)
                    and (item.message.attempt, item.message.hello) == named[1:]
                )
        held = {id(item) for item in self._last_parts.values()}
        return [item for item in items if id(item) not in held]

    def _store_hellos(
        self, client: redis.Redis, stop: threading.Event, *, wait: bool = False
    ) -> None:
        """Store Hellos whose parts are all stored, like Hellos that came in one message.

        With `wait`, block until all of them are assembled and stored.
        """
        for named, item in list(self._last_parts.items()):
            ended: set[str] = set()
            try:
                ranks = self._checks.most_ranks(item.run)
                hello = self._assembly.hello(named, ranks, wait=wait)
                if hello is None:
                    return
                ended = self._store_hello(named, item, hello, stop)
            except WireError as error:
                item.reason = str(error)
            if item.reason is not None:
                with self._store.write() as connection:
                    hellos.forget(connection, named)
            del self._last_parts[named]
            self._settle(client, [item], ended)

    def _store_hello(
        self, named: hellos.HelloKey, item: _Item, hello: Hello, stop: threading.Event
    ) -> set[str]:
        """Commit an assembled Hello, and return ended runs.

        `item` is the last part of the Hello. It gets a `reason` if the Hello is refused.
        """
        assert isinstance(item.message, HelloPart)
        packed = hellos.PackedHello(named.digest, item.message.of)
        assembled = _Item(item.entry, item.run, hello, packed=packed)
        ended = self._write([assembled], stop) if self._check([assembled], sound=True) else set()
        item.reason, item.tries = assembled.reason, assembled.tries
        item.planned, item.step = assembled.planned, assembled.step
        item.completes = assembled.reason is None
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
        good = [item for item in items if item.reason is None]
        _publish(pipeline, good, _entry_at(self._settled_at - _LIVE_S))
        for run in {each.run for each in items if each.introduces} - ended:
            # The run trains, so its streams must not expire, even if it was recorded as ended.
            streams.keep(pipeline, run)
        for run in ended:
            streams.expire(pipeline, run)
        numbers: dict[str, list[bytes]] = {}
        for item in items:
            numbers.setdefault(item.entry.stream, []).append(item.entry.number)
        for stream, of_stream in numbers.items():
            pipeline.xack(stream, INGEST_GROUP, *of_stream)
            pipeline.xdel(stream, *of_stream)
        pipeline.time()
        # The first answers are the numbers of the entries that `rejected.add` made.
        *answers, (self._settled_at, _) = pipeline.execute()
        notes = zip(bad, answers, strict=False)
        rejected.bound(client, [(item.entry.stream, number) for item, number in notes])


def _publish(pipeline: Pipeline, items: Sequence[_Item], oldest: str) -> None:
    """Queue in a pipeline the entries that tell controllers and open pages about stored items.

    Live streams keep no entries before the number `oldest`.
    """
    committed: dict[str, list[msgspec.Raw]] = {}
    changed: dict[str, int | None] = {}
    for item in items:
        # A Hello is too large for the live stream, so the controller reads it in the database.
        if item.introduces:
            data = encode(RunChanged(), item.run)[b"data"]
        else:
            data = item.entry.fields.get(b"data", b"")
        if item.planned and (item.introduces or isinstance(item.message, _PLANNED_ON)):
            committed.setdefault(item.run, []).append(msgspec.Raw(data))
        if item.introduces or item.step is not None or isinstance(item.message, _SHOWN):
            steps = [step for step in (changed.get(item.run), item.step) if step is not None]
            changed[item.run] = min(steps, default=None)
    for run, messages in committed.items():
        entry: Any = encode(Committed(messages), run)
        pipeline.xadd(live(run), entry, minid=oldest)
    if changed:
        fields: Any = {run: b"" if step is None else b"%d" % step for run, step in changed.items()}
        pipeline.xadd(CHANGES, fields, maxlen=CHANGES_LENGTH)


def _entry_at(at: float) -> str:
    """Return the smallest possible number of an entry that arrives at this Unix time."""
    return f"{max(0.0, 1_000 * at):.0f}-0"


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
    """Mark heartbeats that were on the bus for so long that their nodes may be dead by now.

    A heartbeat's age is measured by the bus's clock: an entry's number starts with the time at
    which the bus received it.
    """
    heartbeats = [item for item in items if isinstance(item.message, NodeState)]
    if not heartbeats:
        return
    seconds, microseconds = client.time()
    now_ms = 1_000 * seconds + microseconds // 1_000
    for item in heartbeats:
        item.stale = now_ms - int(item.entry.number.partition(b"-")[0]) > 1_000 * nodes.NODE_ALIVE_S


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


class _StoppedError(Exception):
    """`stop` was set while ingest waited for the database."""


class _Assembly:
    """Assembler of Hellos whose parts are all stored. Not thread-safe.

    A separate thread assembles one Hello at a time. The slow operations (reading, hashing, checking
    numbers) release the interpreter lock, so ingest continues meanwhile.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._pool = ThreadPoolExecutor(1, "hellos")
        self._job: tuple[hellos.HelloKey, Future[Hello]] | None = None

    def hello(self, named: hellos.HelloKey, ranks: int, *, wait: bool = False) -> Hello | None:
        """Return a valid Hello, or None while the thread is still assembling it.

        Args:
            named: the Hello to assemble. A call with another key drops the earlier request.
            ranks: maximum number of ranks of the run.
            wait: block until the Hello is assembled.

        Raises:
            WireError: the parts do not form a valid Hello.
        """
        if self._job is None or self._job[0] != named:
            self._job = named, self._pool.submit(_assembled, self._store, named, ranks)
        job = self._job[1]
        if not (wait or job.done()):
            return None
        self._job = None
        return job.result()


def _assembled(store: Store, named: hellos.HelloKey, ranks: int) -> Hello:
    with store.read() as connection:
        data = hellos.read(connection, named)
    hello = joined(data, named.digest, ranks)
    if hello.attempt != named.attempt:
        raise WireError(f"parts of attempt {named.attempt} form a Hello of attempt {hello.attempt}")
    if reason := defect(hello):
        raise WireError(reason)
    return hello
