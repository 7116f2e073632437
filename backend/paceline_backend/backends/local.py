"""Backend `local`: runs whose processes are started by the agents of nodes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import redis

from paceline_backend.backends.base import (
    Credentials,
    NewRunError,
    NoNodeError,
    NoOptions,
    check_nodes,
    launch_on,
    options_of,
)
from paceline_backend.backends.checks import check_factor, fast_enough
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes.cordons import words

_log = logging.getLogger(__name__)

_TAKE_ANY = "measure again with `paceline check NODE`, or give join_check 0"
_START_AGENTS = "start one with `paceline agent` on the machine that should train"


class Local:
    """`Backend` of runs on one or several nodes with agents."""

    name: ClassVar[str] = "local"
    plans_itself: ClassVar[bool] = False
    options: ClassVar[type[msgspec.Struct]] = NoOptions

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuse scenarios and invalid numbers of nodes."""
        options_of(self.options, new.backend_options)
        check_nodes(new)
        check_factor(new)
        if new.nodes_max > 1 and new.node is not None:
            raise NewRunError(
                "node", "the nodes of a multi-node run are chosen automatically: omit it"
            )

    def place(self, new: NewRun, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the node that the run names, or the least busy nodes that answer.

        Cordoned nodes, spares of other runs and nodes that an engine started for one run get no
        other run, even if a run names them.
        """
        alive = [node for node in nodes if node["alive"]]
        free = [node for node in alive if taken(node) is None]
        if new.nodes_max > 1:
            return _several(new, free)
        if new.node is not None:
            chosen = next((node for node in alive if node["id"] == new.node), None)
            if chosen is None:
                names = ", ".join(node["id"] for node in alive) or "none"
                raise NoNodeError(
                    f"node: {new.node} has no agent that answers; available nodes: {names}"
                )
            if (reason := taken(chosen)) is not None:
                raise NoNodeError(f"node: {reason}")
            return [new.node]
        if not free:
            reasons = "".join(f"{reason}; " for reason in map(taken, alive) if reason)
            raise NoNodeError(
                f"no agent is available: {reasons}{_START_AGENTS}, or use `paceline run`"
            )
        return [str(min(free, key=busy)["id"])]

    def start(self, bus: redis.Redis, run: str, new: NewRun, credentials: Credentials) -> None:
        """Order each node's agent to launch the run."""
        launch_on(bus, run, new, credentials, new.where)


def taken(node: Mapping[str, Any]) -> str | None:
    """Return the reason why a node gets no new run, as a clause; None if it may get one."""
    if node["cordoned"]:
        return f"{words(node['id'], node['cordoned'])}: `paceline uncordon {node['id']}` lifts it"
    if node["spare_of"]:
        return f"node {node['id']} is held back as a spare of run {node['spare_of']}"
    if node["only_run"]:
        return f"node {node['id']} serves only run {node['only_run']}"
    return None


def _several(new: NewRun, free: Sequence[Mapping[str, Any]]) -> list[str]:
    """Choose nodes for a multi-node run, its previous nodes first.

    Leave `new.spares` suitable nodes out, so that they can become the run's spares. Fewer are kept
    as spares if the run would otherwise have fewer than `nodes_min` nodes.
    """
    answering = [node for node in free if node["signed"]]
    suitable, reasons = fast_enough(answering, answering, new.join_check, new.nodes)
    if len(suitable) < new.nodes_min:
        names = ", ".join(node["id"] for node in suitable) or "none"
        slow = "".join(f"{reason}; " for reason in reasons)
        able = "fast enough" if slow else "agents that answer and have a session"
        raise NoNodeError(
            f"nodes_min: {new.nodes_min} nodes are needed; {able}: {len(suitable)} ({names}); "
            f"{slow}{_TAKE_ANY if slow else _START_AGENTS}"
        )
    for reason in reasons:
        _log.warning("run %s leaves out a node: %s", new.name, reason)
    suitable.sort(key=lambda node: (node["id"] not in new.nodes, *busy(node)))
    count = max(new.nodes_min, min(new.nodes_max, len(suitable) - new.spares))
    return [str(node["id"]) for node in suitable[:count]]


def busy(node: Mapping[str, Any]) -> tuple[int, int]:
    """Return a sort key that puts nodes with the fewest runs, and then the most cores, first."""
    return len(node["runs"]), -node["cores"]
