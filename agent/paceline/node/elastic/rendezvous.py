"""Where a run's launchers meet: nowhere if there is only one, else at a store that one serves.

TorchElastic keeps the state of its own rendezvous as a pickle, which may run code when it is read,
in a store that everybody who reaches it can write to. `Signed` reads only what a launcher of the
same run wrote.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]
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
JOIN_S = 600.0  # how long launchers wait until there are enough of them
_LAST_CALL_S = 3.0  # how long enough of them wait for more that may come
_LEAVE_S = 2.0  # for telling the others
_POLL_S = 0.2  # between two questions to the store
# A launcher that says nothing for so many times as many seconds is lost.
_ALIVE_S, _MISSED = 1, 8
_LATE = timedelta(seconds=20)  # how long after that for those of the last round
_MEMBERS = "members"  # key: the launchers of the last round
_LEAVES = "leaves"  # key of a round: a launcher that took part wants to leave
_MAC_BYTES = hashlib.sha256().digest_size


class Alone(RendezvousHandler):
    """The rendezvous of one launcher, in its own memory.

    Args:
        run: that it starts.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._rounds = 0
        self._store = HashStore()
        self._port: socket.socket | None = None  # of rank 0, from now on until the next round

    @property
    def use_agent_store(self) -> bool:
        """Ranks have a store of their own: restarted ranks crash in a loop where they share one."""
        return False

    def get_backend(self) -> str:
        """Its kind, for logs."""
        return "alone"

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run

    def next_rendezvous(self) -> RendezvousInfo:
        """A fresh part of the store, and a free port for the ranks."""
        self._rounds += 1
        store = PrefixStore(f"{self._rounds}", self._store)
        self.shutdown()
        # Rank 0 listens there seconds later, when it has imported torch.
        self._port = reserved_port()
        port = number_of(self._port)
        info = RendezvousStoreInfo.build(0, store, local_addr=LOOPBACK, server_port=port)
        return RendezvousInfo(store, 0, 1, info)

    def is_closed(self) -> bool:
        """Never: there is nobody to close it."""
        return False

    def set_closed(self) -> None:
        """Nothing: there is nobody to tell."""

    def num_nodes_waiting(self) -> int:
        """None ever."""
        return 0

    def shutdown(self) -> bool:
        """Gives the ranks' port back."""
        if self._port is not None:
            self._port.close()
        return True


class Together(DynamicRendezvousHandler):
    """TorchElastic's rendezvous, which also notices launchers that are gone without a word.

    PyTorch's takes them off the list, and waits for the ranks to fail. Ranks whose peer has lost
    power wait for many minutes.
    """

    _joined = 0  # launchers that took part in the last round
    _round: Store  # of the last round
    _port: socket.socket | None = None  # of rank 0, if it is here, until the next round
    members: Members

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for the next round."""
        self._give_back_port()
        info = super().next_rendezvous()
        if info.rank == 0 and info.bootstrap_store_info is not None:
            # PyTorch has just looked it up, and rank 0 listens there when it has imported torch.
            with suppress(OSError):  # it is gone already: rank 0 will say so
                self._port = reserved_port(info.bootstrap_store_info.master_port)
        self._joined, self._round = info.world_size, info.store
        self.members.meet(self._this_node, self._state_holder.state.participants)
        return info

    def _give_back_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def shutdown(self) -> bool:
        """Closes the rendezvous for all, and gives the ranks' port back."""
        self._give_back_port()
        return bool(super().shutdown())

    def num_nodes_waiting(self) -> int:
        """Launchers for whose sake the ranks must meet again: that wait, are gone, or will go.

        Raises:
            RendezvousConnectionError: the store is gone.
        """
        waiting = int(super().num_nodes_waiting())
        try:
            leaves = self._round.check([_LEAVES])
        except RuntimeError as error:
            raise RendezvousConnectionError from error
        return waiting + self.gone + int(leaves)

    def announce_leaving(self) -> None:
        """Tells the others that this launcher will leave once all ranks have ended.

        Raises:
            RuntimeError: the store is gone.
        """
        self._round.set(_LEAVES, "")

    @property
    def gone(self) -> int:
        """Launchers that have left the last round, as known at the last question to the store."""
        return max(0, self._joined - len(self._state_holder.state.participants))

    def leave(self) -> None:
        """Tells the others that this launcher ends: they need not find out.

        Raises:
            RendezvousError: the store is gone.
        """
        self._stop_heartbeats()
        self._give_back_port()
        self.members.note_gone([self._this_node])
        self._op_executor.run(_RendezvousExitOp(), time.monotonic() + _LEAVE_S)


class Members:
    """The launchers of the last round, and which of them will not come to the next round.

    Args:
        store: that all launchers of the run reach.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def meet(self, own: _NodeDesc, participants: Iterable[_NodeDesc]) -> None:
        """Notes who takes part in a round; who was thought to be gone, and came, is not."""
        self._store.set(_MEMBERS, "\n".join(map(str, participants)))
        self._store.delete_key(f"gone/{own}")

    def note_gone(self, launchers: Iterable[_NodeDesc]) -> None:
        """Tells all launchers of some that they have ended."""
        for launcher in launchers:
            self._store.set(f"gone/{launcher}", "")

    def known(self) -> frozenset[str]:
        """The launchers of the last round, also for one that is new; empty: there was none."""
        if not self._store.check([_MEMBERS]):
            return frozenset()
        return frozenset(self._store.get(_MEMBERS).decode().split("\n"))

    def are_in(self, present: Iterable[_NodeDesc]) -> bool:
        """Whether all of the last round that may still come are there."""
        missing = self.known().difference(map(str, present))
        return all(self._store.check([f"gone/{each}"]) for each in missing)


class _Holder(_BackendRendezvousStateHolder):
    """Reads the shared state more often than PyTorch's, and notes which launchers are lost."""

    def __init__(self, backend: Signed, settings: RendezvousSettings, members: Members) -> None:
        super().__init__(backend, settings)
        self._cache_duration = _POLL_S  # type: ignore[assignment]  # any number will do
        self._members = members

    def _sanitize(self) -> None:
        super()._sanitize()
        self._members.note_gone(self._dead_nodes)


class _Executor(_DistributedRendezvousOpExecutor):
    """Completes a round as soon as all are there, where PyTorch's waits for the last call to end.

    It also asks for the state several times a second instead of once.
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
        """Executes an operation, see PyTorch's."""

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
        if state.wait_list or state.redundancy_list:  # they are about to come
            return False
        if len(there) < self._settings.min_nodes or not self._members.known():
            return False
        return self._members.are_in(there)

    def _some_are_late(self, context: _RendezvousContext) -> bool:
        """Whether the last call is over, but launchers of the last round are still on their way.

        On a busy node three seconds may be too few. Without them the round would be followed by
        another one at once.
        """
        state = context.state
        if state.deadline is None or datetime.now(UTC) > state.deadline + _LATE:
            return False
        return not self._members.are_in(state.participants)


def together(run: str, store: Store, key: bytes, nodes: tuple[int, int], address: str) -> Together:
    """The rendezvous of a run's launchers on several nodes.

    Args:
        run: its id.
        store: that all of them reach.
        key: of the run.
        nodes: least and most of them.
        address: of this node, at which the others reach it.

    Raises:
        RendezvousConnectionError: the store does not answer.
    """
    # Otherwise all rounds share the first round's store, whose address later nodes do not get.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    settings = RendezvousSettings(
        run,
        *nodes,
        RendezvousTimeout(
            join=timedelta(seconds=JOIN_S), last_call=timedelta(seconds=_LAST_CALL_S)
        ),
        keep_alive_interval=timedelta(seconds=_ALIVE_S),
        keep_alive_max_attempt=_MISSED,
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
    """A rendezvous' state with a MAC before it.

    Args:
        store: that all launchers of the run reach.
        run: its id.
        key: of the run.
    """

    def __init__(self, store: Store, run: str, key: bytes) -> None:
        super().__init__(store, run)
        self._run_key = key

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token.

        Raises:
            RendezvousStateError: no launcher of this run wrote it.
        """
        stored: Any = super().get_state()
        return None if stored is None else (self._opened(stored[0]), stored[1])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Writes the state if the token is the present one's; what stands then, and whether it did.

        Raises:
            RendezvousStateError: no launcher of this run wrote what stands.
        """
        stored: Any = super().set_state(self._mac(state) + state, token)
        return None if stored is None else (self._opened(stored[0]), stored[1], stored[2])

    def _mac(self, state: bytes) -> bytes:
        return hmac.digest(self._run_key, b"rendezvous\0" + state, "sha256")

    def _opened(self, signed: bytes) -> bytes:
        mac, state = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(state)):
            raise RendezvousStateError("no launcher of this run wrote the rendezvous' state")
        return state
