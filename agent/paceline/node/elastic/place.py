"""Where a run's launchers on several nodes meet, and through which interface of a node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

_TIMEOUT = timedelta(seconds=20)  # of an answer of the rendezvous' store


@dataclass(frozen=True)
class Place:
    """Where a run's launchers on several nodes meet, and what this one is to the others."""

    nodes: tuple[int, int]  # least and most
    address: str  # of this node
    store: tuple[str, int]  # address and port of the rendezvous' store
    door: int | None = None  # listening socket, if this launcher serves the store

    def open(self) -> TCPStore:
        """The store.

        Raises:
            RendezvousConnectionError: it does not answer.
        """
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
    """Makes collectives use the interface of an address, unless variables name another.

    Collectives else use the interface that the host's name resolves to. That may be a loopback's.

    Args:
        address: of this node.

    Returns:
        What is wrong with the interface that a variable names, if anything.
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
