"""Admission of nodes that an engine, or a user, has started for a run.

Such a node repeatedly calls `enlist` over the API until the run is launched on it, or until the
answer says that it is not needed.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline.wire import State
from paceline.wire.states import WAITING
from paceline_backend import backends
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError
from paceline_backend.requests.launch import credentials
from paceline_backend.store import Connection, Store, jobs, new_runs, nodes, runs
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes
from paceline_backend.store.nodes.run_nodes import MultiNodeRun

# If a node has not started a launch after this many seconds, it may have missed the order to
# launch, so the order is sent again.
_LAUNCH_RESEND_S = 8.0


@dataclass(frozen=True)
class Enlisted:
    """Decision about a node that asks to take part in a run."""

    state: State = Field(description="state of the run", examples=["queued"])
    needed: bool = Field(
        description="whether the run needs the node; if not, the node can exit", examples=[True]
    )
    message: str = Field(
        description="why the run does not need the node; empty if it does", examples=[""]
    )


def enlist(store: Store, bus_url: str, run: str, node: str, host: str | None = None) -> Enlisted:
    """Launch a run on a node that was started for it, and return whether the node is needed.

    The node must already read its command stream, and must not have processes of the run. Repeated
    calls are safe, because an agent ignores a second launch.

    `host` is the engine's name of the node's machine, or None if the engine does not report one.

    Raises:
        ConflictError: nodes of this run cannot enlist, or the node's session was not made with the
            run's token.
    """
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            new, state = new_runs.stored(connection, run)
            if not new.has_jobs and new.backend != backends.AdoptedBackend.name:
                raise ConflictError(
                    f"run {run} is on {new.backend}, where nodes cannot ask to join"
                )
            in_engine = (new.backend, host) if new.has_jobs else (None, None)
            if not nodes.bind(connection, node, run, *in_engine):
                raise ConflictError(
                    f"node {node} has no session that was made with the token of run {run}: start "
                    "`paceline node` with that token"
                )
            if state.final:
                return Enlisted(state, False, f"the run is {state}")
            new = replace(new, first_attempt=runs.terms(connection, [run])[run].first_attempt)
            admit = _admit_one if new.nodes_max == 1 else _admit
            answer, launches = admit(connection, run, new, node, state)
            if launches:
                jobs.admit(connection, run)
        if launches:
            new = replace(new, node=node, nodes=[node], signed=True, env={})
            made = credentials(store, bus_url, run, new)
            backends.launch_on(bus, run, new, made, [node])
            streams.tell_change(bus, run)
    return answer


def _admit_one(
    connection: Connection, run: str, new: NewRun, node: str, state: State
) -> tuple[Enlisted, bool]:
    if not jobs.take(connection, run, node):
        return Enlisted(state, False, f"the run trains on {new.node}"), False
    return Enlisted(state, True, ""), state in WAITING


def _admit(
    connection: Connection, run: str, new: NewRun, node: str, state: State
) -> tuple[Enlisted, bool]:
    group = run_nodes.group(connection, run)
    if group is None:
        return Enlisted(state, False, "the run has ended"), False
    row = next((row for row in group.nodes if row.node == node), None)
    if row is not None and row.leaving:
        return Enlisted(state, False, "it was asked to leave the run"), False
    if row is not None:
        again = row.state == State.PENDING and time.time() - row.launched_at > _LAUNCH_RESEND_S
        return Enlisted(state, True, ""), again
    # The run is being relaunched on the nodes that it had. A new node waits until this is done.
    if group.rendezvous.restarts:
        return Enlisted(state, True, ""), False
    if new.has_jobs and not group.nodes and not _all_come(connection, run, new, node):
        # The job still waits for other nodes. A launch on this node alone would find no peers at
        # the rendezvous, and fail after some minutes.
        return Enlisted(state, True, ""), False
    replaces = _replaces(connection, group, node) if new.has_jobs else None
    present = sum(not each.ended for each in group.nodes)
    if replaces is None and present >= new.nodes_max:
        return Enlisted(state, False, f"the run has {new.nodes_max} nodes already"), False
    run_nodes.launch(connection, group.key, [node], group.first_attempt, replaces)
    return Enlisted(state, True, ""), True


def _all_come(connection: Connection, run: str, new: NewRun, node: str) -> bool:
    """Return True if a run's first nodes have arrived, or the engine reports that they start.

    Nodes can arrive before the engine's report, because the engine is queried every few seconds.
    """
    earlier = run_nodes.names(connection, run)
    there = nodes.bound(connection, run).difference(earlier) | {node}
    return len(there) >= new.nodes_min or jobs.begun(connection, run)


def _replaces(connection: Connection, group: MultiNodeRun, node: str) -> str | None:
    """Return the node that `node` replaces, or None if it replaces none.

    Any new node can be the replacement, even if its job was requested for another purpose. Until
    the replaced node leaves, the run may have one node more than its maximum. A node on the same
    machine as the old node is not accepted as replacement.
    """
    wanted = jobs.replaced(connection, group.id)
    done = {row.replaces for row in group.nodes if not row.ended}
    staying = {row.node for row in group.nodes if not row.ended and not row.leaving} - done
    hosts = nodes.hosts(connection, [node, *wanted])
    for other in wanted:
        if other in staying and (hosts[node] is None or hosts[node] != hosts[other]):
            return other
    return None
