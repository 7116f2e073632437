"""Where the launchers of a run on several nodes meet.

The first node of a launch that says where it would serve the rendezvous becomes the run's host.
Each node is then told by a `Meet`. The order of a worker's steps makes it safe to kill it at any
time: a node is noted as told only after it was, so its `Meet` may come twice, and agents ignore the
second.

A host that leaves takes the rendezvous with it. Then the launchers of the others are ended, and the
run is launched anew on the nodes that answer (`requests.regroup`). A host whose launcher failed by
itself fails the run.
"""

from __future__ import annotations

import logging
import time
from typing import TypeAlias

import redis

from paceline.wire import COMMANDS_LENGTH, Kill, Meet, State, commands
from paceline.wire.bus import is_loopback, publish
from paceline_backend.requests import regroup, sessions
from paceline_backend.store import Store, StoreError
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import MultiNodeRun, RunNode

log = logging.getLogger(__name__)

_Order: TypeAlias = tuple[str, str, str, float]  # what, run, node, when it was launched there

_AGAIN_S = 10.0  # a node that does not train by then may have missed its `Meet`


class Meetings:
    """Looks after the meetings of all unfinished runs. For one thread.

    Args:
        store: the database.
        bus_url: ``redis://…``.
    """

    def __init__(self, store: Store, bus_url: str) -> None:
        self._store = store
        self._bus_url = bus_url
        self._ordered_at: dict[_Order, float] = {}  # clock's time

    def look(self, client: redis.Redis) -> bool:
        """Look at all runs once; return whether some are on several nodes.

        Raises:
            redis.RedisError: the bus is away.
            StoreError: or one of its kinds.
        """
        try:
            with self._store.read() as connection:
                groups = run_nodes.groups(connection)
            ids = {group.id for group in groups}
            self._ordered_at = {name: at for name, at in self._ordered_at.items() if name[1] in ids}
            self._attend(client, groups)
            return bool(groups)
        except (StoreError, redis.RedisError):
            self._ordered_at.clear()  # whoever got no order gets it in the next round
            raise

    def _attend(self, client: redis.Redis, groups: list[MultiNodeRun]) -> None:
        for group in groups:
            if group.rendezvous == run_nodes.GONE:
                self._regroup(client, group)
            elif group.rendezvous == run_nodes.ANEW:
                regroup.launch(self._store, self._bus_url, client, group)
            elif failed := _failed_to_start(group):
                self._give_up(client, group, failed)
            elif group.rendezvous is None:
                self._choose(group)  # the next look tells the nodes
            elif _host_left(group) and regroup.begin(self._store, group):
                log.warning("run %s: %s, where its nodes met, went away", group.id, group.host)
            elif regroup.undecided(group):
                regroup.settle(self._store, client, group)
            else:
                self._tell(client, group)

    def _regroup(self, client: redis.Redis, group: MultiNodeRun) -> None:
        """Ends the launchers of a launch, then records the next launch.

        An agent that does not answer may only be cut off: its order waits for it.
        """
        alive = [row for row in group.nodes if row.lost or not row.ended]
        due = [row.node for row in alive if self._due(_order("kill", group, row), first=True)]
        if due:
            why = f"{group.host}, where its nodes met, went away"
            regroup.end_launch(self._store, client, group, due, why)
        if all(row.ended for row in group.nodes):
            regroup.regroup(self._store, client, group)

    def _give_up(self, client: redis.Redis, group: MultiNodeRun, failed: RunNode) -> None:
        """Ends the other launchers: they would wait for long, and the run fails with the cause."""
        why = f"{failed.node} could not start, and without it there are too few nodes"
        going_on = [row for row in group.nodes if not row.ended]
        due = [row.node for row in going_on if self._due(_order("kill", group, row), first=True)]
        if due:
            regroup.end_launch(self._store, client, group, due, why)

    def _choose(self, group: MultiNodeRun) -> None:
        """Makes a node the host, if one has said where it would serve the rendezvous."""
        host = _able_host(group)
        if host is None:
            return
        with self._store.write() as connection:
            place = f"{host.address}:{host.port}"
            if run_nodes.set_rendezvous(connection, group, place, host.node):
                log.info("run %s meets on %s, at %s", group.id, host.node, place)

    def _tell(self, client: redis.Redis, group: MultiNodeRun) -> None:
        """Tells each node that waits for it where to meet."""
        for row in group.nodes:
            if row.address and not row.ended and self._should_meet(group, row):
                key = sessions.keys(self._store, [row.node]).of_node(row.node)
                stream, message = commands(row.node), _order_to(group, row)
                publish(client, stream, message, group.id, maxlen=COMMANDS_LENGTH, key=key)
                with self._store.write() as connection:
                    run_nodes.change(connection, row, {"met": True})

    def _should_meet(self, group: MultiNodeRun, row: RunNode) -> bool:
        order = _order("meet", group, row)
        if row.met and row.state != State.STARTING:
            return False
        return self._due(order, first=not row.met)

    def _due(self, order: _Order, *, first: bool) -> bool:
        """Whether it is time to give an order, for the first time or again."""
        now = time.monotonic()
        if order not in self._ordered_at:
            self._ordered_at[order] = now
            return first
        if now - self._ordered_at[order] < _AGAIN_S:
            return False
        self._ordered_at[order] = now
        return True


def _order(what: str, group: MultiNodeRun, row: RunNode) -> _Order:
    return what, group.id, row.node, row.launched_at


def _failed_to_start(group: MultiNodeRun) -> RunNode | None:
    """A node that failed before any trained, where the others are too few without it.

    They wait for another node instead if it was lost, or if its agent or launcher was killed.
    """
    going_on = [row for row in group.nodes if not row.ended]
    trained = any(row.state == State.RUNNING for row in going_on)
    if trained or not 0 < len(going_on) < group.nodes_min:
        return None
    failed = [row for row in group.nodes if row.state == State.FAILED and not row.lost]
    by_itself = [row for row in failed if row.address is None or row.exit_code is not None]
    return next((row for row in by_itself if not row.orphaned), None)


def _able_host(group: MultiNodeRun) -> RunNode | None:
    """The node that should serve the rendezvous; None: that is not known yet.

    An agent that reaches the bus over loopback says so of its rendezvous, too: only other agents of
    its machine would reach that.
    """
    able = [row for row in group.nodes if row.address and not row.ended]
    reachable = [row for row in able if not is_loopback(str(row.address))]
    if not reachable and any(row.state == State.PENDING for row in group.nodes):
        return None
    return min(reachable or able, key=lambda row: (row.reported_at or 0.0, row.node), default=None)


def _order_to(group: MultiNodeRun, row: RunNode) -> Meet | Kill:
    """Where a node meets the others; or that it cannot."""
    address, _, port = str(group.rendezvous).rpartition(":")
    if is_loopback(address) and not is_loopback(str(row.address)):
        why = (
            f"{row.node} cannot reach {group.host}, where the nodes meet at {address}: stop the "
            f"run, and start the agent of {group.host} with --server and an address of the server "
            "that all nodes reach"
        )
        return Kill(why, group.first_attempt)
    return Meet(address, int(port), group.first_attempt)


def _host_left(group: MultiNodeRun) -> bool:
    """Whether the host is gone for others that went on, or that ended only for that."""
    host = next((row for row in group.nodes if row.node == group.host), None)
    if host is None or not host.away:
        return False
    return any(row.orphaned or not row.ended for row in group.nodes if row is not host)
