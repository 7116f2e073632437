"""Reconciliation of multi-node runs: makes each run's nodes match the state in the database.

`requests` and ingest write the desired state: the nodes on which a run was launched, which of them
leave, and which replace others (`store.nodes.run_nodes`), and the phase of the run's `Rendezvous`.
The worker compares the desired state with the reports of the nodes. For each run,
`NodeReconciler.reconcile` sends the orders that are due, as follows:

* Rendezvous: the first node of a launch that reports an address becomes the host. Each node that
  has reported an address, including a node that joins later, gets a `JoinRendezvous` with the
  host's address.
* Replacement: a node leaves once the node that replaces it has arrived at the rendezvous. A spare
  of the run joins in the place of a lost node.
* Leaving: the order to leave is repeated until the node's launcher has ended.
* Relaunch: if the host goes away, the rendezvous is lost with it. The launchers on the other nodes
  are killed, and the run is relaunched on the nodes that answer (`requests.regroup`). If only the
  host's launcher failed, the run fails.
* End: if too few nodes can start, the other launchers are killed, so that the run fails with the
  real cause. If all nodes ended because the rendezvous was lost, and the run must not restart, the
  run is ended.

All state is in the database, apart from the times of orders. The worker can be killed at any time,
because it records an order only after sending it. A node may therefore get an order twice; agents
ignore the second one. The functions of `requests` send the `Launch` of a node that joins, because
the values of the run's environment variables come with a user's request and are not stored. The
functions of `requests` also send the first order to leave.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import redis

from paceline.wire import COMMANDS_LENGTH, JoinRendezvous, Kill, State, commands
from paceline.wire.bus import is_loopback, publish
from paceline.wire.states import Rendezvous
from paceline_backend.requests import (
    ConflictError,
    InvalidRequestError,
    regroup,
    sessions,
    spares,
    streams,
)
from paceline_backend.requests.joining import order_to_leave
from paceline_backend.requests.replacing import stand_in
from paceline_backend.store import Store, StoreError, nodes
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import MultiNodeRun, RunNode

log = logging.getLogger(__name__)

# Kind of order, run, node, and the time at which the run was launched there.
_Order: TypeAlias = tuple[str, str, str, float]

# Pause before an order is repeated to a node that has not followed it and may have missed it.
_ORDER_AGAIN_S = 10.0
# Pause before the next attempt to replace a lost node, after no spare could take its place.
_SPARE_AGAIN_S = 30.0


class NodeReconciler:
    """Reconciler of all unfinished multi-node runs. Not thread-safe."""

    def __init__(self, store: Store, bus_url: str) -> None:
        self._store = store
        self._bus_url = bus_url
        # Monotonic time at which each order was last given.
        self._ordered_at: dict[_Order, float] = {}
        # By run and lost node: monotonic time of the last attempt, in which no spare could take the
        # node's place.
        self._failed_at: dict[tuple[str, str], float] = {}
        # Runs whose last reconciliation failed unexpectedly, which is logged once.
        self._failing = set[str]()

    def look(self, client: redis.Redis) -> None:
        """Reconcile all runs once."""
        try:
            with self._store.read() as connection:
                groups = run_nodes.groups(connection)
                listed = nodes.listed(connection) if groups else []
            ids = {group.id for group in groups}
            self._ordered_at = {name: at for name, at in self._ordered_at.items() if name[1] in ids}
            self._failed_at = {name: at for name, at in self._failed_at.items() if name[0] in ids}
            self._failing &= ids
            for group in groups:
                self._reconcile_one(client, group, listed)
        except (StoreError, redis.RedisError):
            # Some orders may not have been sent, so the next `look` sends all of them again.
            self._ordered_at.clear()
            raise

    def _reconcile_one(
        self, client: redis.Redis, group: MultiNodeRun, listed: Sequence[Mapping[str, Any]]
    ) -> None:
        try:
            self.reconcile(client, group, listed)
        except (StoreError, redis.RedisError):
            raise
        except Exception:
            if group.id not in self._failing:
                log.exception("run %s: reconciling its nodes failed", group.id)
            self._failing.add(group.id)
        else:
            self._failing.discard(group.id)

    def reconcile(
        self, client: redis.Redis, group: MultiNodeRun, listed: Sequence[Mapping[str, Any]]
    ) -> None:
        """Send the orders that are due in a run, and store the changes of its state. Idempotent.

        `listed` are the rows of `store.nodes.listed`.
        """
        if group.rendezvous is Rendezvous.HOST_LOST:
            self._regroup(client, group)
        elif group.rendezvous is Rendezvous.RELAUNCH:
            regroup.launch(self._store, self._bus_url, client, group)
        elif self._gather(client, group):
            self._replace(client, group, listed)
            self._repeat_orders_to_leave(client, group)

    def _gather(self, client: redis.Redis, group: MultiNodeRun) -> bool:
        """Bring the launchers to the rendezvous; return False if the rendezvous is lost."""
        if failed := _failed_to_start(group):
            self._give_up(client, group, failed)
        elif group.rendezvous is Rendezvous.WAITING:
            # The next `look` sends the address to the nodes.
            self._choose(group)
        elif _host_left(group) and regroup.begin(self._store, group):
            log.warning("run %s: rendezvous host %s was lost", group.id, group.host)
            return False
        elif regroup.undecided(group):
            regroup.settle(self._store, client, group)
            return False
        else:
            self._send_address(client, group)
        return True

    def _choose(self, group: MultiNodeRun) -> None:
        host = _able_host(group)
        if host is None:
            return
        with self._store.write() as connection:
            place = f"{host.address}:{host.port}"
            if run_nodes.advance(connection, group, Rendezvous.READY, host.node, place):
                log.info("run %s: rendezvous on %s, at %s", group.id, host.node, place)

    def _send_address(self, client: redis.Redis, group: MultiNodeRun) -> None:
        for row in group.nodes:
            if row.address and not row.ended and self._should_join(group, row):
                key = sessions.keys(self._store, [row.node]).of_node(row.node)
                stream, message = commands(row.node), _order_to(group, row)
                publish(client, stream, message, group.id, maxlen=COMMANDS_LENGTH, key=key)
                with self._store.write() as connection:
                    run_nodes.change(connection, row, {"met": True})

    def _give_up(self, client: redis.Redis, group: MultiNodeRun, failed: RunNode) -> None:
        """Kill the other launchers, so that the run fails with the real cause, not a timeout."""
        why = f"{failed.node} could not start, and without it there are too few nodes"
        active = [row for row in group.nodes if not row.ended]
        due = [row.node for row in active if self._due(_order("kill", group, row), first=True)]
        if due:
            regroup.end_launch(self._store, client, group, due, why)

    def _regroup(self, client: redis.Redis, group: MultiNodeRun) -> None:
        """Kill all launchers of a launch, then record the next launch.

        A node that does not answer gets the order, too: its agent may only have lost the bus, and
        finds the order on its stream once it reconnects.
        """
        alive = [row for row in group.nodes if row.lost or not row.ended]
        due = [row.node for row in alive if self._due(_order("kill", group, row), first=True)]
        if due:
            why = f"rendezvous host {group.host} was lost"
            regroup.end_launch(self._store, client, group, due, why)
        if all(row.ended for row in group.nodes):
            regroup.regroup(self._store, client, group)

    def _replace(
        self, client: redis.Redis, group: MultiNodeRun, listed: Sequence[Mapping[str, Any]]
    ) -> None:
        for node in _replaced_nodes(group):
            self._order_to_leave(client, group, node)
        if spares.of_run(group.id, listed) and not _host_is_gone(group):
            for node in spares.missed(group):
                self._join_spare(group, node)

    def _order_to_leave(self, client: redis.Redis, group: MultiNodeRun, row: RunNode) -> None:
        log.info("run %s: %s leaves because its replacement has joined", group.id, row.node)
        order_to_leave(self._store, client, group, row.node)
        with self._store.write() as connection:
            run_nodes.change(connection, row, {"leaving": True})
        streams.tell_change(client, group.id)

    def _repeat_orders_to_leave(self, client: redis.Redis, group: MultiNodeRun) -> None:
        """Repeat the order to leave, which may have been lost, to nodes that have not left."""
        for row in group.nodes:
            leaves = row.leaving and not row.ended
            if leaves and self._due(_order("leave", group, row), first=False):
                order_to_leave(self._store, client, group, row.node)

    def _join_spare(self, group: MultiNodeRun, row: RunNode) -> None:
        name, at = (group.id, row.node), time.monotonic()
        if at - self._failed_at.get(name, -_SPARE_AGAIN_S) < _SPARE_AGAIN_S:
            return
        try:
            if stand_in(self._store, self._bus_url, group.id, row.node):
                log.warning("run %s: a spare replaces %s", group.id, row.node)
        except (ConflictError, InvalidRequestError) as error:
            self._failed_at[name] = at
            log.warning("run %s: no spare can replace %s: %s", group.id, row.node, error)

    def _should_join(self, group: MultiNodeRun, row: RunNode) -> bool:
        order = _order("join", group, row)
        if row.met and row.state != State.STARTING:
            return False
        return self._due(order, first=not row.met)

    def _due(self, order: _Order, *, first: bool) -> bool:
        """Return True if an order must be given now; with `first`, also if it was never given."""
        now = time.monotonic()
        if order not in self._ordered_at:
            self._ordered_at[order] = now
            return first
        if now - self._ordered_at[order] < _ORDER_AGAIN_S:
            return False
        self._ordered_at[order] = now
        return True


def _order(what: str, group: MultiNodeRun, row: RunNode) -> _Order:
    return what, group.id, row.node, row.launched_at


def _failed_to_start(group: MultiNodeRun) -> RunNode | None:
    """Return a node that failed before any node trained, if the run has too few nodes without it.

    A node that was lost does not count, and neither does one whose agent or launcher was killed:
    another node can take its place.
    """
    active = [row for row in group.nodes if not row.ended]
    trained = any(row.state == State.RUNNING for row in active)
    if trained or not 0 < len(active) < group.nodes_min:
        return None
    failed = [row for row in group.nodes if row.state == State.FAILED and not row.lost]
    by_itself = [row for row in failed if row.address is None or row.exit_code is not None]
    return next((row for row in by_itself if not row.orphaned), None)


def _able_host(group: MultiNodeRun) -> RunNode | None:
    """Return the node that should serve the rendezvous, or None if that is not known yet.

    An agent that reaches the bus over loopback reports a loopback address for its rendezvous, which
    only agents on the same machine can reach.
    """
    able = [row for row in group.nodes if row.address and not row.ended]
    reachable = [row for row in able if not is_loopback(str(row.address))]
    if not reachable and any(row.state == State.PENDING for row in group.nodes):
        return None
    return min(reachable or able, key=lambda row: (row.reported_at or 0.0, row.node), default=None)


def _order_to(group: MultiNodeRun, row: RunNode) -> JoinRendezvous | Kill:
    """Return the order to join the rendezvous, or to end the launcher if the node cannot join."""
    address, _, port = str(group.address).rpartition(":")
    if is_loopback(address) and not is_loopback(str(row.address)):
        why = (
            f"{row.node} cannot reach the rendezvous on {group.host} at {address}: stop the run, "
            f"and start the agent of {group.host} with --server and an address of the server that "
            "all nodes can reach"
        )
        return Kill(why, group.first_attempt)
    return JoinRendezvous(address, int(port), group.first_attempt)


def _host_left(group: MultiNodeRun) -> bool:
    """Return True if the host went away, and another node is active or ended because of that."""
    host = next((row for row in group.nodes if row.node == group.host), None)
    if host is None or not host.away:
        return False
    return any(row.orphaned or not row.ended for row in group.nodes if row is not host)


def _replaced_nodes(group: MultiNodeRun) -> list[RunNode]:
    active = {row.node: row for row in group.nodes if not row.ended and not row.leaving}
    others = [row for row in group.nodes if row.replaces in active and not row.ended]
    there = [row for row in others if row.arrived or row.state == State.RUNNING]
    return [active[str(row.replaces)] for row in there]


def _host_is_gone(group: MultiNodeRun) -> bool:
    # If the host is gone, no spare joins now, because the relaunch includes the spares.
    return any(row.gone for row in group.nodes if row.node == group.host)
