"""Child processes that do not outlive their parents."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # not after a fork: it takes locks


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies (Linux; elsewhere a no-op).

    For ``preexec_fn``: an orphaned rank would train on, and an orphaned server keep its port. The
    kernel means the parent *thread*: start such children from one that lives as long as they shall.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
