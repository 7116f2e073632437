"""Fetches a rank's parts of the plan from the ranks' store before they are needed.

A store in another place takes a round trip for each call, and reading a part takes three of them:
to wait for it, to get it and to delete it. A thread makes these calls while the rank trains. It
stays within the epoch that the rank is in: after the last epoch nothing comes, and the store ends.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from torch.distributed import DistError, DistStoreError

from paceline.data.keeper import NodePart
from paceline.train.parts import Part, get_part, part_key, put_part

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_END = Part(0, 0, 0, [], [], [], [], b"", False, stop=True)
_JOIN_S = 2.0


class Fetcher:
    """One rank's parts, in order of their segments; call `close` in the end.

    Args:
        store: the ranks' store. The thread has a connection of its own, because a call that waits
            would hold up the others.
        rank: whose parts to fetch.
        on_node: the thread calls it with what a segment says about this rank's node.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        on_node: Callable[[NodePart], None] = lambda part: None,
    ) -> None:
        self._on_node = on_node
        self._store = store
        self._rank = rank
        self._wait_s = store.timeout.total_seconds()  # type: ignore[attr-defined]
        self._parts: SimpleQueue[Part | Exception] = SimpleQueue()
        self._segment = 0  # of the part that the thread fetches
        self._changed = threading.Condition()
        self._epoch = -1  # that the rank is in
        self._closing = False
        self._calls = False  # the thread may be in a call that waits
        self._thread = threading.Thread(target=self._run, name="paceline-plan", daemon=True)
        self._thread.start()
        # A script that fails closes nothing, and the interpreter must not end in mid-call.
        atexit.register(self.close)

    def enter(self, epoch: int) -> None:
        """Lets the thread fetch the parts of an epoch; call it when the rank enters the epoch."""
        with self._changed:
            self._epoch = epoch
            self._changed.notify_all()

    def next(self) -> Part:
        """The next part; waits for it for as long as the store's calls wait.

        Raises:
            torch.distributed.DistError: rank 0 has ended, or stored nothing for too long.
            Exception: what `fail` was called with.
        """
        try:
            part = self._parts.get(timeout=self._wait_s)
        except Empty:
            raise DistStoreError(f"rank 0 stored no plan for {self._wait_s:.0f} s") from None
        if isinstance(part, Exception):
            self._parts.put(part)  # whoever asks again learns the same
            raise part
        return part

    def fail(self, error: Exception) -> None:
        """Have `next` raise this error after the parts that are here. Any thread may call it."""
        self._parts.put(error)

    def close(self) -> None:
        """Ends the thread, waiting for it unless its call does not end."""
        atexit.unregister(self.close)
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            calls = self._calls  # not after the plan's end, when the store may have ended
        segment = self._segment
        if calls:
            with contextlib.suppress(DistError):  # the store has ended: so has the thread's call
                put_part(self._store, segment, self._rank, _END)
                put_part(self._store, segment + 1, self._rank, _END)  # the thread may just go to it
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            store = self._store.clone()  # type: ignore[attr-defined]
            after = -1
            while self._may_go_on(after):
                after = self._fetch(store)
        except DistError as error:
            self._parts.put(error)

    def _may_go_on(self, after: int) -> bool:
        """Waits until the rank has come to an epoch after this one; False: the thread ends."""
        with self._changed:
            self._calls = False
            self._changed.wait_for(lambda: self._closing or self._epoch > after)
            self._calls = not self._closing
            return self._calls

    def _fetch(self, store: Store) -> int:
        """Fetches the next part; returns the number of the epoch that is over with it, or -1."""
        began = time.monotonic()
        try:
            part = get_part(store, self._segment, self._rank)
        except DistStoreError:
            # The rank may be busy for longer, as with an evaluation: `next` says how long it waits.
            if time.monotonic() - began < self._wait_s / 2:
                raise
            return -1
        if part.node is not None:
            self._on_node(part.node)
        self._parts.put(part)
        store.delete_key(part_key(self._segment, self._rank))
        self._segment += 1
        return part.epoch if part.epoch_end or part.stop else -1
