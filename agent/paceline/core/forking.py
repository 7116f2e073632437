"""Protection of forked processes from what other threads do at the time of the fork.

A forked process has only the thread that forked. If another thread was importing a module at that
time, the forked process can never import this module: it waits forever for the other thread to
finish. The same holds for locks. DataLoader forks its workers while the library's threads run, so
these threads import modules, and call the script's own code for the first time, in `no_fork`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Maximum time for which `no_fork` delays forks.
_MOST_S = 10.0


class _Forks:
    """Lock of this process that `no_fork` and each forking thread hold."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Set the state of a process in which no thread holds the lock."""
        self.lock = threading.RLock()
        # True if a fork has waited for the maximum time; later ones do not wait again.
        self.late = False
        self._forking = threading.local()

    def begin(self) -> None:
        self._forking.locked = self.lock.acquire(timeout=0 if self.late else _MOST_S)
        self.late = not self._forking.locked

    def end(self) -> None:
        if self._forking.locked:
            self.lock.release()


_forks = _Forks()
os.register_at_fork(before=_forks.begin, after_in_parent=_forks.end, after_in_child=_forks.reset)


@contextmanager
def no_fork() -> Iterator[None]:
    """Delay forks of this process by other threads, together at most 10 s, until the block ends."""
    with _forks.lock:
        try:
            yield
        finally:
            _forks.late = False
