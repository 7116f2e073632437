"""Forks of this process wait until no other thread imports a module.

A forked process has only the thread that forked. If another thread was importing a module at that
time, the forked process can never import this module: it waits forever for the other thread to
finish. Python does not prevent this. It happens if DataLoader forks its workers while a thread, of
this library or of the script, reads its first sample or sends its first message. Other libraries
have such locks, too: OpenSSL takes one while a thread sets up TLS.
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

# Maximum time for which a fork waits.
_MOST_S = 10.0
_POLL_S = 0.001

# References to the locks of the modules that are being imported, by name; a lock's `owner` is the
# importing thread. Python has no public access to them.
_imports: dict[str, Any] = getattr(importlib._bootstrap, "_module_locks", {})
# Threads in `no_fork`, by identifier.
_critical: list[int] = []


@cache
def delay_forks() -> None:
    """Let all forks of this process wait, at most 10 s each, until no other thread is critical.

    A thread is critical while it imports a module, and in `no_fork`.
    """
    os.register_at_fork(before=_wait, after_in_child=_critical.clear)


@contextmanager
def no_fork() -> Iterator[None]:
    """Let forks by other threads wait until the block ends. Threads do not wait for each other."""
    _critical.append(threading.get_ident())
    try:
        yield
    finally:
        # In a process that the block forked, the list is empty.
        if threading.get_ident() in _critical:
            _critical.remove(threading.get_ident())


def _wait() -> None:
    until = time.monotonic() + _MOST_S
    while _others_are_critical() and time.monotonic() < until:
        time.sleep(_POLL_S)


def _others_are_critical() -> bool:
    locks = [reference() for reference in list(_imports.values())]
    threads = {*_critical, *(lock.owner for lock in locks if lock is not None)}
    return not threads <= {None, threading.get_ident()}
