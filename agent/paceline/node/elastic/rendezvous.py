"""Rendezvous of a run's launchers: `Alone` for one node, `Together` for several.

On several nodes, one of the launchers serves the store. `RunRendezvous` has the store's address,
and opens the store; `use_interface` chooses the network interface for the ranks' collectives.
TorchElastic stores the state of its rendezvous as a pickle, which may execute code when it is read,
and any program that reaches the store can write to it. So `Signed` reads only state that a launcher
of the same run has written.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
    Token,
    _Action,
    _BackendRendezvousStateHolder,
    _DistributedRendezvousOpExecutor,
    _NodeDesc,
    _RendezvousContext,
    _RendezvousExitOp,
    _RendezvousJoinOp,
    _RendezvousState,
    _should_keep_alive,
)

from paceline.node.processes import number_of, reserved_port

LOOPBACK = "127.0.0.1"
# Maximum number of seconds that launchers wait until the minimum number of nodes is present.
NODES_WAIT_S = 600.0
# Seconds that launchers wait for further nodes once the minimum number is present.
_LAST_CALL_S = 3.0
# Maximum number of seconds for notifying the other launchers when this launcher leaves.
_LEAVE_S = 2.0
_POLL_S = 0.2
# A launcher that sends no heartbeat for `_MISSED_BEATS` intervals of `_LAUNCHER_BEAT_S` seconds is
# lost.
_LAUNCHER_BEAT_S, _MISSED_BEATS = 1, 8
# Additional time that a round waits for launchers that took part in the previous round.
_LATE = timedelta(seconds=20)
_STORE_TIMEOUT = timedelta(seconds=20)
# Key in the run's store. Its value lists the launchers of the last round.
_MEMBERS = "members"
# Key in a round's store. It is set if one of the round's launchers wants to leave.
_LEAVES = "leaves"
_MAC_BYTES = hashlib.sha256().digest_size


class Alone(RendezvousHandler):
    """The rendezvous of a single launcher, which keeps its state in memory."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._rounds = 0
        self._store = HashStore()
        # Port that is reserved for rank 0, from the rendezvous until the next round.
        self._port: socket.socket | None = None

    @property
    def use_agent_store(self) -> bool:
        """False: ranks use a store of their own.

        If ranks shared the launcher's store, restarted ranks would crash in a loop.
        """
        return False

    def get_backend(self) -> str:
        """Return the kind of rendezvous, for logs."""
        return "alone"

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run

    def next_rendezvous(self) -> RendezvousInfo:
        """Begin a round at once; return an unused prefix of the store, and a port for rank 0."""
        self._rounds += 1
        store = PrefixStore(f"{self._rounds}", self._store)
        self.shutdown()
        # Reserve the port, because rank 0 listens on it only seconds later, after importing torch.
        self._port = reserved_port()
        port = number_of(self._port)
        info = RendezvousStoreInfo.build(0, store, local_addr=LOOPBACK, server_port=port)
        return RendezvousInfo(store, 0, 1, info)

    def is_closed(self) -> bool:
        """Return False: no other launcher can close this rendezvous."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is no other launcher."""

    def num_nodes_waiting(self) -> int:
        """Return 0: there is no other launcher."""
        return 0

    def shutdown(self) -> bool:
        """Release the port that is reserved for rank 0."""
        if self._port is not None:
            self._port.close()
        return True


class Together(DynamicRendezvousHandler):
    """TorchElastic's rendezvous, which also detects launchers that disappear without leaving.

    TorchElastic only removes lost launchers from its list, and waits until the ranks of the other
    launchers fail. If a machine loses power, this may take many minutes.
    """

    # Number of launchers that took part in the last round.
    _joined = 0
    # Store of the last round.
    _round: Store
    # Port that is reserved for rank 0 until the next round, if rank 0 is on this node.
    _port: socket.socket | None = None
    members: Members

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round; return its store, and this launcher's index in the round."""
        self._give_back_port()
        info = super().next_rendezvous()
        if info.rank == 0 and info.bootstrap_store_info is not None:
            # TorchElastic has just chosen the port. Reserve it until rank 0 listens on it, after
            # importing torch. If another process already uses the port, rank 0 reports the error.
            with suppress(OSError):
                self._port = reserved_port(info.bootstrap_store_info.master_port)
        self._joined, self._round = info.world_size, info.store
        self.members.begin_round(self._this_node, self._state_holder.state.participants)
        return info

    def _give_back_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def shutdown(self) -> bool:
        """Close the rendezvous for all launchers, and release the port reserved for rank 0."""
        self._give_back_port()
        return bool(super().shutdown())

    def num_nodes_waiting(self) -> int:
        """Return the number of reasons for a new round; 0: the present round continues.

        Each launcher that waits for a round or is gone counts as 1. If launchers have announced
        that they will leave, this adds 1, however many they are. A RendezvousConnectionError is
        raised if the store is gone.
        """
        waiting = int(super().num_nodes_waiting())
        try:
            leaves = self._round.check([_LEAVES])
        except RuntimeError as error:
            raise RendezvousConnectionError from error
        return waiting + self.gone + int(leaves)

    def announce_leaving(self) -> None:
        """Notify the other launchers that this one will leave once all ranks have ended.

        Raise a RuntimeError if the store is gone.
        """
        self._round.set(_LEAVES, "")

    @property
    def gone(self) -> int:
        """Number of lost or departed launchers of the last round, as last read from the store."""
        return max(0, self._joined - len(self._state_holder.state.participants))

    def leave(self) -> None:
        """Notify the other launchers that this one ends, so that they need not detect its loss.

        Raise a RendezvousError if the store is gone.
        """
        self._stop_heartbeats()
        self._give_back_port()
        self.members.note_gone([self._this_node])
        self._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE_S)


class Members:
    """The launchers of the last round, and which of them will not join the next round."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def begin_round(self, own: _NodeDesc, participants: Iterable[_NodeDesc]) -> None:
        """Record the launchers of a round. This launcher, `own`, no longer counts as gone."""
        self._store.set(_MEMBERS, "\n".join(map(str, participants)))
        self._store.delete_key(f"gone/{own}")

    def note_gone(self, launchers: Iterable[_NodeDesc]) -> None:
        """Record in the store that launchers have ended or were lost, for all other launchers."""
        for launcher in launchers:
            self._store.set(f"gone/{launcher}", "")

    def known(self) -> frozenset[str]:
        """Return the launchers of the last round, even if this launcher was not among them."""
        if not self._store.check([_MEMBERS]):
            return frozenset()
        return frozenset(self._store.get(_MEMBERS).decode().split("\n"))

    def are_in(self, present: Iterable[_NodeDesc]) -> bool:
        """Return True if all launchers of the last round that may still join are present."""
        missing = self.known().difference(map(str, present))
        return all(self._store.check([f"gone/{each}"]) for each in missing)


class _Holder(_BackendRendezvousStateHolder):
    """A reader of the rendezvous's shared state, which polls often and records lost launchers."""

    def __init__(self, backend: Signed, settings: RendezvousSettings, members: Members) -> None:
        super().__init__(backend, settings)
        self._cache_duration = _POLL_S  # type: ignore[assignment]  # seconds
        self._members = members

    def _sanitize(self) -> None:
        super()._sanitize()
        self._members.note_gone(self._dead_nodes)


class _Executor(_DistributedRendezvousOpExecutor):
    """An executor that completes a round as soon as all expected launchers have joined.

    TorchElastic's executor always waits `_LAST_CALL_S` seconds for further nodes, and reads the
    state only once a second.
    """

    def __init__(
        self, node: _NodeDesc, holder: _Holder, settings: RendezvousSettings, members: Members
    ) -> None:
        super().__init__(node, holder, settings)
        self._members = members

    def run(
        self,
        state_handler: Callable[[_RendezvousContext, float], _Action],
        deadline: float,
        update_deadline: Callable[[timedelta], float] | None = None,
    ) -> None:
        def handler(context: _RendezvousContext, until: float) -> _Action:
            joins = isinstance(state_handler, _RendezvousJoinOp)
            while True:
                if joins and self._is_complete(context.state):
                    return _Action.MARK_RENDEZVOUS_COMPLETE
                action = state_handler(context, until)
                if action is _Action.MARK_RENDEZVOUS_COMPLETE and self._some_are_late(context):
                    action = _Action.KEEP_ALIVE if _should_keep_alive(context) else _Action.SYNC
                if action is not _Action.SYNC:
                    return action
                time.sleep(_POLL_S)
                self._state_holder.sync()
                self._state = self._state_holder.state
                context = _RendezvousContext(self._node, self._state, self._settings)

        super().run(handler, deadline, update_deadline)

    def _is_complete(self, state: _RendezvousState) -> bool:
        there = state.participants
        if state.complete or state.closed or self._node not in there:
            return False
        # Launchers on these lists are about to join.
        if state.wait_list or state.redundancy_list:
            return False
        if len(there) < self._settings.min_nodes or not self._members.known():
            return False
        return self._members.are_in(there)

    def _some_are_late(self, context: _RendezvousContext) -> bool:
        """Return True while a round should wait longer than `_LAST_CALL_S`, at most for `_LATE`.

        It waits for launchers of the previous round, which on a busy node may need longer to join.
        A round without these launchers would be followed by another round at once.
        """
        state = context.state
        if state.deadline is None or datetime.now(UTC) > state.deadline + _LATE:
            return False
        return not self._members.are_in(state.participants)


def together(run: str, store: Store, key: bytes, nodes: tuple[int, int], address: str) -> Together:
    """Return the rendezvous of a run's launchers on several nodes.

    `nodes` is the minimum and maximum number of nodes. `address` is the address of this node, for
    the other nodes. A RendezvousConnectionError is raised if the store does not answer.
    """
    # Without this setting, all rounds would share the first round's store, whose address is not
    # sent to nodes that join later.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    settings = RendezvousSettings(
        run,
        *nodes,
        RendezvousTimeout(
            join=timedelta(seconds=NODES_WAIT_S), last_call=timedelta(seconds=_LAST_CALL_S)
        ),
        keep_alive_interval=timedelta(seconds=_LAUNCHER_BEAT_S),
        keep_alive_max_attempt=_MISSED_BEATS,
    )
    node = Together._node_desc_generator.generate(address)
    members = Members(store)
    backend = Signed(store, run, key)
    holder = _Holder(backend, settings, members)
    made = Together(node, settings, backend.name, store, holder)
    made.members = members
    made._op_executor = _Executor(node, holder, settings, members)
    return made


class Signed(C10dRendezvousBackend):
    """State of a rendezvous that is stored with a MAC, made with the run's key.

    Methods raise a RendezvousStateError if no launcher of this run wrote the stored state.
    """

    def __init__(self, store: Store, run: str, key: bytes) -> None:
        super().__init__(store, run)
        self._run_key = key

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the stored state and its token; None if no state is stored."""
        stored: Any = super().get_state()
        return None if stored is None else (self._opened(stored[0]), stored[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write the state if it has not changed since the caller received `token`.

        Return the stored state, its token, and True if the given state was written.
        """
        stored: Any = super().set_state(self._mac(state) + state, token)
        return None if stored is None else (self._opened(stored[0]), stored[1], stored[2])

    def _mac(self, state: bytes) -> bytes:
        return hmac.digest(self._run_key, b"rendezvous\0" + state, "sha256")

    def _opened(self, signed: bytes) -> bytes:
        mac, state = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(state)):
            raise RendezvousStateError("the rendezvous state is not from a launcher of this run")
        return state


@dataclass(frozen=True)
class RunRendezvous:
    """The rendezvous of a run on several nodes, as one of its launchers uses it."""

    # Minimum and maximum number of nodes.
    nodes: tuple[int, int]
    # Address of this node, for the other nodes.
    address: str
    # Address and port of the rendezvous store.
    store: tuple[str, int]
    # Descriptor of the listening socket, if this launcher serves the store.
    door: int | None = None

    def open(self) -> TCPStore:
        """Connect to the store, or serve it; if that fails, raise a RendezvousConnectionError."""
        try:
            if self.door is None:
                return TCPStore(*self.store, None, is_master=False, timeout=_STORE_TIMEOUT)
            return TCPStore(
                *self.store,
                None,
                is_master=True,
                wait_for_workers=False,
                timeout=_STORE_TIMEOUT,
                master_listen_fd=self.door,
            )
        except RuntimeError as error:
            raise RendezvousConnectionError from error


def use_interface(address: str) -> str | None:
    """Make collectives use the interface with this address, unless a variable names another one.

    Without this call, collectives use the interface to which the host's name resolves, which may be
    the loopback interface. Return an error message if GLOO_SOCKET_IFNAME names an interface that
    this node does not have, else None.
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
