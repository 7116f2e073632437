"""Child processes that do not outlive their parents, and ports for child processes."""

from __future__ import annotations

import ctypes
import signal
import socket
import sys

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
# The library is loaded here and not after a fork, because loading takes locks.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere a no-op).

    Pass this function to `subprocess.Popen` as ``preexec_fn``. The kernel watches the parent
    *thread*: start children from a thread that lives as long as they should.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def rename(name: str) -> None:
    """Set the name under which `ps` and `top` show this process (Linux; at most 15 characters)."""
    if _libc is not None:
        _libc.prctl(_PR_SET_NAME, name.encode())


def reserved_port(port: int = 0) -> socket.socket:
    """Reserve a port of all interfaces while the returned socket is open; `port` 0: any free port.

    While the socket is open, the kernel does not assign the port to other processes that request
    any free port, or to outgoing connections. But a server that sets SO_REUSEADDR, as most do, can
    listen on it. An OSError is raised if the port is not free.
    """
    both = socket.has_dualstack_ipv6()
    reserved = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if both:
            reserved.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        reserved.bind(("", port))
    except OSError:
        reserved.close()
        raise
    return reserved


def number_of(reserved: socket.socket) -> int:
    """Return the number of a reserved port."""
    return int(reserved.getsockname()[1])
