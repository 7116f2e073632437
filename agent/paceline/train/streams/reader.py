"""Reads a rank's samples of a stream in a thread, into the buffer from which batches are made."""

from __future__ import annotations

import hmac
import logging
import math
import pickle
import threading
import time
from collections.abc import Generator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from torch.distributed import DistError
from torch.utils.data import Dataset

from paceline.core.errors import PacelineError
from paceline.core.streaming.ledger import LEAST_BATCHES
from paceline.core.streaming.reading import Claim, ShardClaims, ShardOrder, difference
from paceline.data.stream import Stream
from paceline.train.feature import Feature
from paceline.train.startup import Startup
from paceline.train.streams import news
from paceline.train.streams.news import BufferSize, News
from paceline.train.streams.processes import OPTIONS, in_processes

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger(__name__)

# The number of the filler sample.
FILLER = -1

_MAC_BYTES = 32  # of SHA-256
# A report is sent as soon as it has this many samples.
_SENT_AT_ONCE = 64
# Maximum number of seconds before a sample is reported, unless reading the next sample takes
# longer.
_SEND_S = 0.05
_POLL_S = 0.05
_JOIN_S = 2.0
_READERS = {*OPTIONS, "persistent_workers"}


def refuse_small(stream: Stream, global_batch: int) -> None:
    """Raise a ValueError if a stream's buffer has too few samples to balance steps."""
    if stream.buffer < LEAST_BATCHES * global_batch:
        raise ValueError(
            f"Stream(buffer={stream.buffer}): must be at least {LEAST_BATCHES} times global_batch, "
            f"{LEAST_BATCHES * global_batch}, to leave a choice of samples for balanced steps"
        )


class StreamReader(Feature):
    """Reader of one rank's samples of a stream, epoch by epoch. Call its methods in one thread.

    A sample's number is the number of samples that the rank had read before it in the epoch. A
    second thread reads while the buffer has room. It reports a sample only when it has read the
    next one or the source has ended. So a rank that has not reported its end has at least one more
    sample. The order of the source's shards depends on `seed`.
    """

    def __init__(self, stream: Stream, startup: Startup, seed: int) -> None:
        self.stream, self._rank, self._store = stream, startup.rank, startup.store
        self._key = startup.key
        stream.reading.seed = seed if stream.shuffle else None
        self._changed = threading.Condition()
        self._samples: dict[int, Any] = {}
        self._equal = BufferSize(math.ceil(stream.buffer / startup.world), 1 / startup.world)
        self._room = self._equal
        # The event that ends the reading of the current epoch.
        self._pass: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._smallest: tuple[float, Any] | None = None
        self._warned = False
        self.options: dict[str, Any] = {}

    def reads(self, dataset: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Replace the data set by the buffer, which the loader's own process reads.

        The options that concern processes are used by this rank's reading thread instead.
        """
        self.options = {name: options[name] for name in OPTIONS if name in options}
        return _Buffered(self), {n: v for n, v in options.items() if n not in _READERS}

    def begin_epoch(self, epoch: int) -> None:
        """Begin to read an epoch, and drop the remaining samples of the epoch before it."""
        self._end()
        self._samples = {}
        # At the end of the previous epoch, the leader may have given this rank the buffer space of
        # ranks that had ended.
        self._room = self._equal
        self._pass = over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(epoch, over), name="paceline-stream", daemon=True
        )
        self._thread.start()

    def take(self, numbers: list[int]) -> list[Any]:
        """Return the samples of a batch. Each sample is returned only once, except for the filler.

        Raise a PacelineError if this rank has not read one of the samples.
        """
        with self._changed:
            try:
                taken = [self._samples.pop(n) for n in numbers if n != FILLER]
            except KeyError as error:
                raise PacelineError(f"sample {error} of the stream is not in the buffer") from error
            self._changed.notify_all()
        return taken or [self._filler()] * len(numbers)

    def left_epoch(self, epoch: int) -> None:
        """End the reading thread."""
        self._end()

    def release(self) -> None:
        """End the reading thread."""
        self._end()

    def _end(self) -> None:
        """End the thread. Waits for the thread at most 2 s, because the source may hang."""
        if self._pass is None or self._thread is None:
            return
        with self._changed:
            self._pass.set()
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        self._pass = self._thread = None

    def _filler(self) -> Any:
        """Return the smallest sample that this rank has read, or else a sample of another rank."""
        if self._smallest is None:
            pickled = opened(self._store.get(news.FILLER), self._key)
            if not pickled:
                raise PacelineError(
                    f"rank {self._rank} has read no sample, and samples of other ranks cannot be "
                    "pickled: give each rank some samples"
                )
            self._smallest = (math.inf, pickle.loads(pickled))
        return self._smallest[1]

    def _run(self, epoch: int, over: threading.Event) -> None:
        try:
            store = self._store.clone()  # type: ignore[attr-defined]
            sender = _NewsSender(store, epoch, self._rank)
            try:
                self._read(epoch, over, store, sender)
            except DistError:
                raise
            except BaseException as error:
                # The log has the traceback, with the lines of the script's own code.
                if not over.is_set():
                    logger.exception("rank %s cannot read the stream", self._rank)
                name = "" if isinstance(error, PacelineError) else f"{type(error).__name__}: "
                sender.failed(f"{name}{error}")
        except DistError:
            # Rank 0, which serves the store, has ended.
            pass

    def _read(self, epoch: int, over: threading.Event, store: Store, sender: _NewsSender) -> None:
        number, held = 0, None
        with closing(self._source(epoch, over)) as samples:
            for sample in samples:
                if over.is_set():
                    return
                if isinstance(sample, ShardOrder):
                    self._compare(sample, epoch, store)
                    continue
                if held is not None:
                    self._keep(number, held, store, over)
                    sender.add(held[0])
                    number += 1
                    self._await_room(over, store, sender)
                held = self._sized(sample)
        if over.is_set():
            return
        if held is not None:
            self._keep(number, held, store, over)
            sender.add(held[0])
        sender.end()

    def _compare(self, seen: ShardOrder, epoch: int, store: Store) -> None:
        """Warn once if two readings of a shard differ in the number or the order of its samples."""
        key = news.order_key(epoch, seen.shard)
        first = store.compare_set(key, "", seen.word).decode()
        if not self._warned and (differs := difference(first, seen.word)):
            self._warned = True
            logger.warning(
                "shard %s %s: ranks read different parts of a shard, so some of its samples are "
                "lost, and some may be trained twice; let open yield all samples of a shard in the "
                "same order each time, and leave shuffling and splitting to paceline.data.Stream",
                seen.name,
                differs,
            )

    def _source(self, epoch: int, over: threading.Event) -> Generator[Any]:
        # Claims use a separate connection to the store, because with reading processes another
        # thread makes the claims.
        store, key = self._store.clone(), news.claims_key(epoch)  # type: ignore[attr-defined]
        claims = ShardClaims(
            lambda: store.get(key).decode() if store.check([key]) else "",
            lambda old, new: store.compare_set(key, old, new).decode(),
            self._rank,
        )
        count = self.options.get("num_workers", 0)

        def claim(shards: int) -> Claim | None:
            self._await_room(over, store)
            share = self._room.share / max(1, count)
            return None if over.is_set() else claims.take(shards, share)

        reading = self.stream.reading
        if count:
            yield from in_processes(reading, epoch, claim, self.options)
        else:
            yield from reading.samples(epoch, claim)

    def _sized(self, sample: Any) -> tuple[float, Any]:
        try:
            size = float(self.stream.size(sample))
        # The script's own code may raise anything.
        except Exception as error:
            raise ValueError(f"size(sample): {type(error).__name__}: {error}") from error
        if not (math.isfinite(size) and size > 0):
            raise ValueError(f"size(sample) is {size:g}: sizes must be finite and > 0")
        return size, sample

    def _keep(
        self, number: int, held: tuple[float, Any], store: Store, over: threading.Event
    ) -> None:
        size, sample = held
        if self._smallest is None and store.add(news.FILLER_ASKED, 1) == 1:
            store.set(news.FILLER, signed(_pickled(sample), self._key))  # type: ignore[arg-type]
        if self._smallest is None or size < self._smallest[0]:
            self._smallest = (size, sample)
        with self._changed:
            if not over.is_set():
                self._samples[number] = sample

    def _await_room(
        self, over: threading.Event, store: Store, sender: _NewsSender | None = None
    ) -> None:
        """Report pending samples, and wait until the buffer has room or the epoch is over."""
        while not over.is_set():
            with self._changed:
                if len(self._samples) < self._room.samples:
                    return
            if sender is not None:
                sender.flush()
            if store.check([news.room_key(self._rank)]):
                self._room = news.decode_room(store.get(news.room_key(self._rank)))
            with self._changed:
                if len(self._samples) >= self._room.samples and not over.is_set():
                    self._changed.wait(_POLL_S)


class _Buffered(Dataset[Any]):
    """A rank's buffer as a map-style data set, which yields each sample once."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader

    def __getitem__(self, number: int) -> Any:
        return self._reader.take([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[Any]:
        return self._reader.take(numbers)


class _NewsSender:
    def __init__(self, store: Store, epoch: int, rank: int) -> None:
        self._store, self._epoch, self._rank = store, epoch, rank
        self._sizes: list[float] = []
        self._number = 0
        self._sent_at = time.monotonic()

    def add(self, size: float) -> None:
        self._sizes.append(size)
        waited_s = time.monotonic() - self._sent_at
        if len(self._sizes) >= _SENT_AT_ONCE or waited_s >= _SEND_S:
            self.flush()

    def flush(self) -> None:
        if self._sizes:
            self._send(News(self._sizes))

    def end(self) -> None:
        self._send(News(self._sizes, ended=True))

    def failed(self, why: str) -> None:
        self._send(News([], error=why))

    def _send(self, word: News) -> None:
        key = news.news_key(self._epoch, self._rank, self._number)
        self._store.set(key, news.encode(word))  # type: ignore[arg-type]
        self._sizes, self._sent_at = [], time.monotonic()
        self._number += 1


def _pickled(sample: Any) -> bytes:
    """Pickle a sample for ranks that have read none; return b"" on failure."""
    try:
        return pickle.dumps(sample)
    # A sample's own __reduce__ may raise anything.
    except Exception:
        return b""


def signed(pickled: bytes, key: bytes) -> bytes:
    """Prepend a MAC to a pickle, because unpickling runs code."""
    return _mac(pickled, key) + pickled


def opened(word: bytes, key: bytes) -> bytes:
    """Return the pickle; raise a PacelineError if no rank of this session wrote it."""
    mac, pickled = word[:_MAC_BYTES], word[_MAC_BYTES:]
    if not hmac.compare_digest(mac, _mac(pickled, key)):
        raise PacelineError(
            "the filler sample in the ranks' store was not written by a rank of this session"
        )
    return pickled


def _mac(pickled: bytes, key: bytes) -> bytes:
    return hmac.digest(key, b"filler\0" + pickled, "sha256")
