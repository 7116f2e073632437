"""Reads a rank's shards of the leader's segments, and yields the rank's steps.

On ranks other than 0, a `Fetcher` reads shards from the ranks' store before they are needed.
Reading a shard takes three calls, to wait for the shard, to get it and to delete it, and each call
to a remote store takes a round trip. A thread makes these calls while the rank trains. The thread
reads only shards up to the end of the rank's current epoch: after the last epoch no shard follows,
and the store ends.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from torch.distributed import DistError, DistStoreError

from paceline.core.errors import PacelineError
from paceline.data.prefetcher import NodeShard
from paceline.train.plan_shard import LocalStep, PlanShard, get_shard, put_shard, shard_key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from paceline.train.plan.leader import Leader

_END = PlanShard(0, 0, 0, [], [], [], [], b"", False, stop=True)
_JOIN_S = 2.0


class Follower:
    """Reader of one rank's steps from the ranks' store, segment by segment. Not thread-safe.

    Every rank has a follower and must `close` it. On rank 0 the follower also drives the leader,
    which adopts the next segment when the follower needs it. The follower calls `on_node`, in any
    thread, with each segment's shard for this rank's node.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        leader: Leader | None,
        on_node: Callable[[NodeShard], None] = lambda shard: None,
    ) -> None:
        self._rank = rank
        self._leader = leader
        self._on_node = on_node
        self._fetcher = Fetcher(store, rank, on_node) if leader is None else None
        self.stopped = False
        # True if the plan ended because nodes join or leave.
        self.reforms = False
        # True while the follower waits for a segment. Any thread may read this.
        self.waits = False

    def steps(self, epoch: int, ahead: int = 0) -> Iterator[LocalStep]:
        """Return the steps of an epoch, waiting for each segment until the leader has stored it.

        A step is only returned when `ahead` later steps of the epoch are planned, too. The leader
        plans when rank 0 asks for a step. So rank 0 must set `ahead` if its loader fetches fewer
        steps in advance than the loaders of other ranks.

        Raises:
            PacelineError: the ranks are not in the same epoch, or the plan cannot continue.
            torch.distributed.DistError: rank 0 has ended, or stored nothing for too long.
        """
        return self._ahead(epoch, ahead) if ahead else self._steps(epoch)

    def _ahead(self, epoch: int, ahead: int) -> Iterator[LocalStep]:
        planned: deque[LocalStep] = deque()
        for step in self._steps(epoch):
            planned.append(step)
            if len(planned) > ahead:
                yield planned.popleft()
        yield from planned

    def fail(self, error: Exception) -> None:
        """Make `steps` raise this error instead of waiting for a segment. Thread-safe."""
        if self._fetcher is not None:
            self._fetcher.fail(error)

    def close(self) -> None:
        """End the thread that fetches the plan, if there is one."""
        if self._fetcher is not None:
            self._fetcher.close()

    def _steps(self, epoch: int) -> Iterator[LocalStep]:
        if self._fetcher is not None and not self.stopped:
            self._fetcher.enter(epoch)
        while not self.stopped:
            self.waits = True
            shard = self._next(epoch)
            self.waits = False
            if shard.failed:
                raise PacelineError(shard.failed)
            if shard.stop:
                self.stopped, self.reforms = True, shard.reform
            elif shard.epoch == epoch:
                yield from shard.steps()
                if shard.epoch_end:
                    return
            elif shard.epoch > epoch:
                raise PacelineError(
                    f"rank {self._rank} is in epoch {epoch} but the leader is in epoch "
                    f"{shard.epoch}: every rank must iterate over the loader the same number of "
                    "times"
                )
            # A shard of an earlier epoch is skipped: all ranks left that epoch early.

    def _next(self, epoch: int) -> PlanShard:
        if self._leader is None:
            assert self._fetcher is not None
            return self._fetcher.next()
        shard = self._leader.advance(epoch)
        if shard.node is not None:
            self._on_node(shard.node)
        return shard


class Fetcher:
    """Queue of one rank's shards, in the order of their segments. Call `close` at the end.

    A thread fills the queue. It has its own connection to the store, because a call that waits
    blocks all others on its connection.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        on_node: Callable[[NodeShard], None] = lambda shard: None,
    ) -> None:
        self._on_node = on_node
        self._store = store
        self._rank = rank
        self._wait_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self._shards: SimpleQueue[PlanShard | Exception] = SimpleQueue()
        self._segment = 0
        self._changed = threading.Condition()
        self._epoch = -1
        self._closing = False
        # True while the thread may be blocked in a call to the store.
        self._calls = False
        self._thread = threading.Thread(target=self._run, name="paceline-plan", daemon=True)
        self._thread.start()
        # A script that fails does not call `close`, and the interpreter must not exit while the
        # thread is in a call to the store.
        atexit.register(self.close)

    def enter(self, epoch: int) -> None:
        """Permit the thread to fetch the shards of an epoch, which the rank enters now."""
        with self._changed:
            self._epoch = epoch
            self._changed.notify_all()

    def next(self) -> PlanShard:
        """Return the next shard, waiting for it at most as long as the store's timeout.

        Raises:
            torch.distributed.DistError: rank 0 has ended, or stored nothing for too long.
            Exception: the error that `fail` was called with.
        """
        try:
            shard = self._shards.get(timeout=self._wait_s)
        except Empty:
            raise DistStoreError(f"rank 0 stored no plan for {self._wait_s:.0f} s") from None
        if isinstance(shard, Exception):
            # The next caller gets the same error.
            self._shards.put(shard)
            raise shard
        return shard

    def fail(self, error: Exception) -> None:
        """Make `next` raise this error after the fetched shards. Any thread may call this."""
        self._shards.put(error)

    def close(self) -> None:
        """End the thread. Wait for it at most 2 s, because its current call may not return."""
        atexit.unregister(self.close)
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            # `calls` is False after the plan's end, when the store may have ended.
            calls = self._calls
        segment = self._segment
        if calls:
            # Store the shard for which the thread waits, so that its call returns. If the store
            # has ended, the thread's call has failed already.
            with contextlib.suppress(DistError):
                put_shard(self._store, segment, self._rank, _END)
                # The thread may just have moved on to the next segment.
                put_shard(self._store, segment + 1, self._rank, _END)
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            store = self._store.clone()  # type: ignore[attr-defined]
            after = -1
            while self._may_continue(after):
                after = self._fetch(store)
        except DistError as error:
            self._shards.put(error)

    def _may_continue(self, after: int) -> bool:
        """Wait for an epoch later than `after` to begin; return False if the thread must end."""
        with self._changed:
            self._calls = False
            self._changed.wait_for(lambda: self._closing or self._epoch > after)
            self._calls = not self._closing
            return self._calls

    def _fetch(self, store: Store) -> int:
        """Fetch the next shard; return the number of its epoch if it ends the epoch, else -1."""
        began = time.monotonic()
        try:
            shard = get_shard(store, self._segment, self._rank)
        except DistStoreError:
            # A timeout is not an error here: rank 0 may be busy for longer, for example with an
            # evaluation. `next` limits the rank's own wait.
            if time.monotonic() - began < self._wait_s / 2:
                raise
            return -1
        if shard.node is not None:
            self._on_node(shard.node)
        self._shards.put(shard)
        store.delete_key(shard_key(self._segment, self._rank))
        self._segment += 1
        return shard.epoch if shard.epoch_end or shard.stop else -1
