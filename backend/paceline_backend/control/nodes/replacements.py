"""Replacement of nodes: replaced nodes leave, and spares take the place of lost nodes."""

from __future__ import annotations

import logging
import time

import redis

from paceline.wire import State
from paceline_backend.requests import ConflictError, InvalidRequestError, spares, streams
from paceline_backend.requests.joining import order_to_leave
from paceline_backend.requests.replacing import stand_in
from paceline_backend.store import Store, nodes
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import ANEW, GONE, MultiNodeRun, RunNode

log = logging.getLogger(__name__)

# Pause after a spare could not take the place of a lost node.
_AGAIN_S = 30.0


class Replacements:
    """Manager of node replacements in all unfinished runs. Not thread-safe.

    All state is in the database. An order to leave is sent before it is recorded, so a worker that
    is killed in between sends it twice, which changes nothing.
    """

    def __init__(self, store: Store, bus_url: str) -> None:
        self._store = store
        self._bus_url = bus_url
        # By run and lost node: monotonic time of the last failure.
        self._failed_at: dict[tuple[str, str], float] = {}

    def look(self, client: redis.Redis) -> bool:
        """Check all runs once, and return True if any run has several nodes."""
        with self._store.read() as connection:
            groups = run_nodes.groups(connection)
            listed = nodes.listed(connection) if groups else []
        for group in groups:
            if group.rendezvous in (GONE, ANEW):
                # The run is being relaunched.
                continue
            for node in _makes_way(group):
                self._let_go(client, group, node)
            if spares.of_run(group.id, listed) and not _host_is_gone(group):
                for node in spares.missed(group):
                    self._stand_in(group, node)
        return bool(groups)

    def _let_go(self, client: redis.Redis, group: MultiNodeRun, row: RunNode) -> None:
        log.info("run %s: %s leaves because its replacement has joined", group.id, row.node)
        order_to_leave(self._store, client, group, row.node)
        with self._store.write() as connection:
            run_nodes.change(connection, row, {"leaving": True})
        streams.tell_change(client, group.id)

    def _stand_in(self, group: MultiNodeRun, row: RunNode) -> None:
        name, at = (group.id, row.node), time.monotonic()
        if at - self._failed_at.get(name, -_AGAIN_S) < _AGAIN_S:
            return
        try:
            if stand_in(self._store, self._bus_url, group.id, row.node):
                log.warning("run %s: a spare replaces %s", group.id, row.node)
        except (ConflictError, InvalidRequestError) as error:
            self._failed_at[name] = at
            log.warning("run %s: no spare can replace %s: %s", group.id, row.node, error)


def _makes_way(group: MultiNodeRun) -> list[RunNode]:
    """Return the nodes whose replacements have arrived."""
    going_on = {row.node: row for row in group.nodes if not row.ended and not row.leaving}
    others = [row for row in group.nodes if row.replaces in going_on and not row.ended]
    there = [row for row in others if row.arrived or row.state == State.RUNNING]
    return [going_on[str(row.replaces)] for row in there]


def _host_is_gone(group: MultiNodeRun) -> bool:
    # The run is relaunched then, together with its spares.
    return any(row.gone for row in group.nodes if row.node == group.host)
