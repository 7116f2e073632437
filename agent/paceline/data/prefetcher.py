"""Prefetcher of the samples that a node will need.

The first rank of each node makes a `Prefetcher` and passes it each segment's plan as a `NodeShard`.
Training never waits for the prefetcher: a step reads missing samples itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from paceline.core.errors import PacelineError
from paceline.core.forking import no_fork
from paceline.core.outage import Outage
from paceline.data.sharded import Sharded

logger = logging.getLogger(__name__)

_RETRY_S, _MOST_RETRY_S = 0.5, 30.0
_JOIN_S = 2.0
_NO_EPOCH = -1
# Number of later segments that must be planned before a segment's samples count as read by all
# ranks.
_PLANNED_SEGMENTS = 2

Bools = npt.NDArray[np.bool_]


class NodeShard(msgspec.Struct, frozen=True, array_like=True):
    """Plan of a segment for one node."""

    epoch: int
    # Indices of the samples that the node's ranks train, in the order of the steps, as
    # little-endian uint32.
    trained: bytes
    # Indices of the samples that the node stores in the next epoch, as little-endian uint32; None:
    # not decided yet.
    holds: bytes | None = None


@dataclass(frozen=True)
class Moved:
    """Samples that were moved to a node for an epoch."""

    # Number of bytes of the samples that the plan moves to the node, without the samples that the
    # node had already.
    planned_bytes: int = 0
    bytes: int = 0
    samples: int = 0
    # Seconds from the arrival of the plan until the last sample was stored.
    seconds: float = 0.0


class Prefetcher:
    """Thread that keeps a node's directory up to date with the plan. Call `close` at the end.

    The thread first fetches the samples of planned segments. Then it fetches the samples that the
    node stores in the next epoch, within the data set's bandwidth limit. To make room, the thread
    removes other samples. It never removes a sample that the node will still train in this epoch or
    that it stores in the next one.

    This process must have claimed the data set's directory. `held` has the indices of the samples
    in that directory. `filler` is the index of the filler sample.
    """

    def __init__(self, data: Sharded, held: list[int], filler: int) -> None:
        self._data = data
        self._filler = filler
        samples = len(data)
        self._epoch = _NO_EPOCH
        # Samples that the node stores in this epoch.
        self._now: Bools = np.zeros(samples, bool)
        self._now[held] = True
        self._trained: Bools = np.zeros(samples, bool)
        # The samples of each segment that ranks may still be reading.
        self._planned: deque[npt.NDArray[np.uint32]] = deque()
        # Samples that the node stores in the next epoch; None: not decided yet.
        self._next: Bools | None = None
        # Samples to fetch for planned segments, one list for each segment.
        self._steps: deque[list[int]] = deque([[filler]])
        # Samples to fetch for the next epoch; that epoch's number (`_ahead_for`); and the samples
        # that the plan moves to the node for that epoch (`_comes`).
        self._ahead: deque[int] = deque()
        self._ahead_for = _NO_EPOCH
        self._comes: set[int] = set()
        self._planned_at = 0.0
        self._moved: dict[int, Moved] = {}
        # Monotonic time from which the bandwidth limit allows fetching the next sample.
        self._free_at = 0.0
        self._busy = False
        self._full = False
        self._has_fetched = False
        # `_plans` is the number of plans that have arrived so far. `_seen` and `_listed` are this
        # number at earlier times: when the sample that is being fetched was chosen, and when
        # `_removable` was listed.
        self._plans = 0
        self._seen = 0
        self._listed = -1
        self._removable: deque[int] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._outage = Outage(
            logger,
            "samples cannot be prefetched; steps read them directly",
            "samples are prefetched again",
            first_s=_RETRY_S,
            most_s=_MOST_RETRY_S,
        )
        self._thread = threading.Thread(target=self._run, name="paceline-data", daemon=True)
        self._thread.start()

    def take(self, shard: NodeShard) -> None:
        """Add a segment's plan. Call this in the order of the segments, from any thread."""
        trained = np.frombuffer(shard.trained, "<u4")
        with self._changed:
            if shard.epoch != self._epoch:
                self._enter(shard.epoch)
            self._now[trained] = True
            self._planned.append(trained)
            if len(self._planned) > _PLANNED_SEGMENTS:
                self._trained[self._planned.popleft()] = True
            self._steps.append(trained.tolist())
            if shard.holds is not None:
                self._plan_next(shard)
            self._full = False
            self._plans += 1
            self._changed.notify_all()

    def moved(self, epoch: int) -> Moved:
        """Return the counts of samples moved to the node for an epoch so far. Thread-safe."""
        with self._changed:
            return self._moved.get(epoch, Moved())

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until all samples that fit are fetched; return False on a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and self._idle(), timeout_s)

    def close(self) -> None:
        """End the thread and release the directory. Waits for the thread at most 2 s."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        self._data.directory.release()

    def _enter(self, epoch: int) -> None:
        if self._next is not None:
            self._now = self._next
        self._epoch, self._next = epoch, None
        self._trained[:] = False
        self._planned.clear()
        self._steps.clear()
        for old in [known for known in self._moved if known < epoch]:
            del self._moved[old]

    def _plan_next(self, shard: NodeShard) -> None:
        holds: Bools = np.zeros(len(self._data), bool)
        assert shard.holds is not None
        holds[np.frombuffer(shard.holds, "<u4")] = True
        # The leader sends `holds` for the next epoch a second time at the epoch's end. The list may
        # have changed, because ranks have trained further samples since.
        again = self._next is not None
        there = self._data.directory.has
        news = np.flatnonzero(holds & ~self._now).tolist()
        self._next = holds
        self._ahead = deque(np.flatnonzero(holds).tolist())
        if not again:
            self._comes = {sample for sample in news if not there(sample)}
            comes = self._data.lengths[sorted(self._comes)]
            self._ahead_for = shard.epoch + 1
            self._planned_at = time.monotonic()
            self._moved[self._ahead_for] = Moved(int(comes.sum()))

    def _idle(self) -> bool:
        return self._full or not (self._steps or self._ahead)

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closing.is_set() or not self._idle())
                sample, ahead = self._chosen()
                self._seen = self._plans
                self._busy = sample is not None
            if sample is None:
                continue
            try:
                self._get(sample, ahead)
                self._outage.succeeded()
            except (OSError, PacelineError) as error:
                self._again(sample, ahead)
                self._closing.wait(self._outage.failed(error))

    def _chosen(self) -> tuple[int | None, bool]:
        """Return a pair: the next sample to fetch, and True if it is for the next epoch.

        The sample is None if nothing may be fetched now. The caller holds the lock.

        The last samples of a segment are fetched first, because ranks that have begun the segment
        read its first samples themselves.
        """
        while self._steps:
            if self._steps[0]:
                return self._steps[0].pop(), False
            self._steps.popleft()
        wait_s = self._free_at - time.monotonic()
        if self._ahead and wait_s > 0:
            self._changed.wait(wait_s)
            return None, True
        return (self._ahead.popleft(), True) if self._ahead else (None, True)

    def _again(self, sample: int, ahead: bool) -> None:
        with self._changed:
            if ahead:
                self._ahead.append(sample)
            # A sample that a planned step needs is not requeued: the step itself reads the sample
            # from the source, sooner than this thread would.

    def _get(self, sample: int, ahead: bool) -> None:
        directory, size = self._data.directory, int(self._data.lengths[sample])
        if directory.has(sample):
            return
        if not self._make_room(size):
            self._no_room(sample, ahead)
            return
        data = self._fetched(sample)
        if ahead and self._data.bandwidth is not None:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._data.bandwidth
        # `put` fails if a step has used the room, or if the disk is full.
        if not directory.put(sample, data):
            self._no_room(sample, ahead)
        elif ahead:
            self._count(sample, size)

    def _fetched(self, sample: int) -> bytes:
        if self._has_fetched:
            return self._data.fetch(sample)
        # A source may set up its connection when it is first read.
        with no_fork():
            data = self._data.fetch(sample)
        self._has_fetched = True
        return data

    def _no_room(self, sample: int, ahead: bool) -> None:
        """Handle a sample that does not fit: a sample for the next epoch is tried again later.

        If no plan has arrived since the sample was chosen, fetch nothing until the next plan.
        """
        with self._changed:
            if ahead:
                self._ahead.appendleft(sample)
            if self._plans == self._seen:
                self._steps.clear()
                self._full = True

    def _count(self, sample: int, size: int) -> None:
        with self._changed:
            if sample not in self._comes:
                # The plan does not move this sample to the node: the node trained it earlier, but
                # had no room to store it.
                return
            before = self._moved.get(self._ahead_for, Moved())
            self._moved[self._ahead_for] = Moved(
                before.planned_bytes,
                before.bytes + size,
                before.samples + 1,
                time.monotonic() - self._planned_at,
            )

    def _make_room(self, size: int) -> bool:
        if self._fits(size):
            return True
        if self._listed != self._seen:
            self._list_removable()
        while self._removable:
            self._data.directory.remove(self._removable.popleft())
            if self._fits(size):
                return True
        return False

    def _list_removable(self) -> None:
        # Listing takes long if there are millions of samples, so it is done once for each plan.
        with self._changed:
            needed = self._now if self._next is None else self._next | (self._now & ~self._trained)
            needed = needed.copy()
        needed[self._filler] = True
        there = np.array(self._data.directory.samples(), np.int64)
        self._removable, self._listed = deque(there[~needed[there]].tolist()), self._seen

    def _fits(self, size: int) -> bool:
        directory = self._data.directory
        return directory.used_bytes + size <= directory.limit_bytes
