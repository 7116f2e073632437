"""The rendezvous address of a run on several nodes, and the network interface that a node uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

# Limit for an answer of the rendezvous store.
_TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True)
class RunRendezvous:
    """The rendezvous of a run on several nodes, as one of its launchers uses it."""

    # Least and largest number of nodes.
    nodes: tuple[int, int]
    # Address of this node for the others.
    address: str
    # Address and port of the rendezvous store.
    store: tuple[str, int]
    # Listening socket, if this launcher serves the store.
    door: int | None = None

    def open(self) -> TCPStore:
        """Connect to the store, or serve it; else raise a RendezvousConnectionError."""
        try:
            if self.door is None:
                return TCPStore(*self.store, None, is_master=False, timeout=_TIMEOUT)
            return TCPStore(
                *self.store,
                None,
                is_master=True,
                wait_for_workers=False,
                timeout=_TIMEOUT,
                master_listen_fd=self.door,
            )
        except RuntimeError as error:
            raise RendezvousConnectionError from error


def use_interface(address: str) -> str | None:
    """Make collectives use the interface of this node's address, unless variables name another.

    Otherwise collectives use the interface to which the host's name resolves. That may be the
    loopback interface. Return the problem with the interface that a variable names; None if there
    is none.
    """
    known = {
        name: {entry.address for entry in entries}
        for name, entries in psutil.net_if_addrs().items()
    }
    own = next((name for name, addresses in known.items() if address in addresses), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if own is not None and not os.environ.get(variable):
            os.environ[variable] = own
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if own is None or not set(filter(None, given.split(","))) - set(known):
        return None
    return f"GLOO_SOCKET_IFNAME is {given!r}, but this node's interfaces are {', '.join(known)}"
