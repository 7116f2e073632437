"""The thread that fetches ahead what a node will need: one on each node, in its first rank."""

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
from paceline.core.outage import Outage
from paceline.data.sharded import Sharded

logger = logging.getLogger(__name__)

_RETRY_S, _MOST_RETRY_S = 0.5, 30.0
_JOIN_S = 2.0
_FIRST = -1  # the epoch before any plan has come
_READ = 2  # segments later a segment's samples have been read, whichever rank reads ahead

Bools = npt.NDArray[np.bool_]


class NodePart(msgspec.Struct, frozen=True, array_like=True):
    """What a segment says about one node."""

    epoch: int
    trained: bytes  # little-endian uint32: samples that its ranks train, step by step
    holds: bytes | None = None  # the same of those it holds in the next epoch, once that is decided


@dataclass(frozen=True)
class Moved:
    """What came to a node for an epoch."""

    planned_bytes: int = 0  # that the plan moves to the node and that it did not have
    bytes: int = 0
    samples: int = 0
    seconds: float = 0.0  # from the plan until the last of them was there


class Keeper:
    """Keeps a node's directory as the plan wants it, in the background; call `close` in the end.

    It fetches what the steps of a planned segment need, as soon as the segment is known, and then
    what the node holds in the next epoch, within the data's bandwidth. Where there is no room it
    removes what the node will not need any more: never a sample that the node is still to train in
    this epoch, or holds in the next. Steps do not depend on it: what is not there they read
    themselves.

    Args:
        data: the data set, whose directory this process has claimed.
        held: the samples that are there.
        filler: the sample that ranks without samples load.
    """

    def __init__(self, data: Sharded, held: list[int], filler: int) -> None:
        self._data = data
        self._filler = filler
        samples = len(data)
        self._epoch = _FIRST
        self._now: Bools = np.zeros(samples, bool)  # held in this epoch
        self._now[held] = True
        self._trained: Bools = np.zeros(samples, bool)  # by this node in this epoch
        self._planned: deque[npt.NDArray[np.uint32]] = deque()  # segments that may still be read
        self._next: Bools | None = None  # held in the next epoch; None: not decided yet
        self._steps: deque[list[int]] = deque([[filler]])  # what segments need
        self._ahead: deque[int] = deque()  # what the next epoch needs
        self._ahead_for = _FIRST  # that epoch
        self._comes: set[int] = set()  # what the plan moves to the node for it
        self._planned_at = 0.0
        self._moved: dict[int, Moved] = {}
        self._free_at = 0.0  # when the bandwidth allows the next sample
        self._busy = False  # a sample is being fetched
        self._full = False  # no room until the plan says more
        self._plans = 0  # that have come
        self._seen = 0  # of them, when the sample that is being fetched was chosen
        self._listed = -1  # of them, when `_removable` was listed
        self._removable: deque[int] = deque()  # samples that the plan needs no more
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._outage = Outage(
            logger,
            "samples cannot be fetched ahead, and steps read them themselves",
            "samples are fetched ahead again",
            first_s=_RETRY_S,
            most_s=_MOST_RETRY_S,
        )
        self._thread = threading.Thread(target=self._run, name="paceline-data", daemon=True)
        self._thread.start()

    def take(self, part: NodePart) -> None:
        """Takes in a segment's plan. For any thread; segments come in their order."""
        trained = np.frombuffer(part.trained, "<u4")
        with self._changed:
            if part.epoch != self._epoch:
                self._enter(part.epoch)
            self._now[trained] = True
            self._planned.append(trained)
            if len(self._planned) > _READ:
                self._trained[self._planned.popleft()] = True
            self._steps.append(trained.tolist())
            if part.holds is not None:
                self._plan_next(part)
            self._full = False
            self._plans += 1
            self._changed.notify_all()

    def moved(self, epoch: int) -> Moved:
        """What has come to the node for an epoch so far. For any thread."""
        with self._changed:
            return self._moved.get(epoch, Moved())

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until there is nothing to fetch that there is room for; False: it took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy and self._idle(), timeout_s)

    def close(self) -> None:
        """Ends the thread; waits for it unless a read does not end."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_S)
        self._data.directory.release()

    def _enter(self, epoch: int) -> None:
        """Begins an epoch: the node holds what was decided for it."""
        if self._next is not None:
            self._now = self._next
        self._epoch, self._next = epoch, None
        self._trained[:] = False
        self._planned.clear()
        self._steps.clear()
        for old in [known for known in self._moved if known < epoch]:
            del self._moved[old]

    def _plan_next(self, part: NodePart) -> None:
        holds: Bools = np.zeros(len(self._data), bool)
        assert part.holds is not None
        holds[np.frombuffer(part.holds, "<u4")] = True
        again = self._next is not None  # at the epoch's end, as training has gone on since
        there = self._data.directory.has
        news = np.flatnonzero(holds & ~self._now).tolist()
        self._next = holds
        self._ahead = deque(np.flatnonzero(holds).tolist())
        if not again:
            self._comes = {sample for sample in news if not there(sample)}
            comes = self._data.lengths[sorted(self._comes)]
            self._ahead_for = part.epoch + 1
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
                self._outage.over()
            except (OSError, PacelineError) as error:
                self._again(sample, ahead)
                self._closing.wait(self._outage.failed(error))

    def _chosen(self) -> tuple[int | None, bool]:
        """The next sample, and whether it is for the next epoch. Holds the lock.

        A segment's samples are taken from its end: ranks that have begun with it read the first
        ones themselves.
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
        """Puts a sample back that could not be fetched."""
        with self._changed:
            if ahead:
                self._ahead.append(sample)
            # What a step needs is read by the step itself, sooner than here.

    def _get(self, sample: int, ahead: bool) -> None:
        directory, size = self._data.directory, int(self._data.lengths[sample])
        if directory.has(sample):
            return
        if not self._make_room(size):
            self._no_room(sample, ahead)
            return
        data = self._data.fetch(sample)
        if ahead and self._data.bandwidth is not None:
            self._free_at = max(self._free_at, time.monotonic()) + size / self._data.bandwidth
        if not directory.put(sample, data):  # a step has taken the room, or the disk is full
            self._no_room(sample, ahead)
        elif ahead:
            self._count(sample, size)

    def _no_room(self, sample: int, ahead: bool) -> None:
        """Puts a sample back that does not fit, and rests until the plan says more."""
        with self._changed:
            if ahead:
                self._ahead.appendleft(sample)
            if self._plans == self._seen:
                self._steps.clear()  # steps read themselves what they need
                self._full = True

    def _count(self, sample: int, size: int) -> None:
        with self._changed:
            if sample not in self._comes:
                return  # it was trained here, where there was no room for it
            before = self._moved.get(self._ahead_for, Moved())
            self._moved[self._ahead_for] = Moved(
                before.planned_bytes,
                before.bytes + size,
                before.samples + 1,
                time.monotonic() - self._planned_at,
            )

    def _make_room(self, size: int) -> bool:
        """Removes what is not needed until so many bytes fit; False: they do not."""
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
        """Lists the directory: once for each plan, as it may have millions of samples."""
        with self._changed:
            needed = self._now if self._next is None else self._next | (self._now & ~self._trained)
            needed = needed.copy()
        needed[self._filler] = True
        there = np.array(self._data.directory.samples(), np.int64)
        self._removable, self._listed = deque(there[~needed[there]].tolist()), self._seen

    def _fits(self, size: int) -> bool:
        directory = self._data.directory
        return directory.used_bytes + size <= directory.limit_bytes
