"""Child processes that do not outlive their parents."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies (Linux; elsewhere a no-op).

    For ``preexec_fn``: an orphaned rank would train on, and an orphaned server keep its port.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
