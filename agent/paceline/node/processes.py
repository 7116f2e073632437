"""Child processes that do not outlive their parents, and ports for them."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # not after a fork: it takes locks


def die_with_parent() -> None:
    """Asks the kernel to kill this process when its parent dies (Linux; elsewhere a no-op).

    For ``preexec_fn``. Otherwise an orphaned rank would train on, and an orphaned server would keep
    its port. The kernel watches the parent *thread*: start children from a thread that lives as
    long as they should.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
