"""Spares: idle nodes that are held back for a run, to take the place of slow or lost nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline_backend.backends.checks import fast_enough
from paceline_backend.backends.local import busy, taken
from paceline_backend.requests.errors import ConflictError, InvalidRequestError
from paceline_backend.store import Connection, runs
from paceline_backend.store.new_runs import NewRun
from paceline_backend.store.nodes import run_nodes, spares
from paceline_backend.store.nodes.run_nodes import MultiNodeRun, RunNode

# Rows of `store.nodes.listed`.
Listed = Sequence[Mapping[str, Any]]


def check(new: NewRun, *, start: bool) -> None:
    """Raise `InvalidRequestError` if a run requests spares but cannot have spares."""
    if new.replace_slow_nodes and not new.spares:
        raise InvalidRequestError("replace_slow_nodes", "needs spares: set `spares` to 1 or more")
    if not new.spares:
        return
    if new.backend != "local" or not start:
        message = (
            'only for a run that the control plane launches, with backend "local": omit `spares`'
        )
        raise InvalidRequestError("spares", message)
    if new.nodes_max == 1:
        raise InvalidRequestError(
            "spares", "only for a run on several nodes: set `nodes_max` to 2 or more"
        )


def hold(connection: Connection, run: str, new: NewRun, listed: Listed, *, all_: bool) -> None:
    """Reserve idle nodes as spares for a run whose nodes have just been chosen.

    Raises:
        ConflictError: `all_` is set, and fewer than `new.spares` nodes are idle and fast enough.
    """
    if not new.spares:
        return
    idle = [node for node in _idle(connection, listed) if node["id"] not in new.nodes]
    own = [node for node in listed if node["id"] in new.nodes]
    fast, reasons = fast_enough(idle, own, new.join_check)
    names = [node["id"] for node in fast]
    if all_ and len(names) < new.spares:
        slow = "".join(f"{reason}; " for reason in reasons)
        raise ConflictError(
            f"spares: {new.spares} idle nodes are needed besides {', '.join(new.nodes)}, and there "
            f"are {len(names)}: {slow}start more agents, or ask for fewer nodes or spares"
        )
    spares.hold(connection, runs.key_of(connection, run), names[: new.spares])


def _idle(connection: Connection, listed: Listed) -> list[Mapping[str, Any]]:
    used = {run.node for run in runs.unfinished(connection)}
    used |= {
        row.node for each in run_nodes.groups(connection) for row in each.nodes if not row.ended
    }
    idle = [node for node in listed if node["alive"] and node["signed"] and not node["runs"]]
    return sorted((n for n in idle if n["id"] not in used and taken(n) is None), key=busy)


def of_run(run: str, listed: Listed) -> list[str]:
    """Return the spares of a run that answer and are not cordoned."""
    return [
        node["id"]
        for node in listed
        if node["spare_of"] == run and node["alive"] and not node["cordoned"]
    ]


def missed(group: MultiNodeRun) -> list[RunNode]:
    """Return the nodes of a launch that were lost and not replaced yet."""
    stood_in_for = {row.replaces for row in group.nodes}
    return [row for row in group.nodes if row.gone and row.node not in stood_in_for]


def stand_ins(group: MultiNodeRun, listed: Listed) -> list[dict[str, Any]]:
    """Return nodes on which a run may be relaunched: its own nodes, and spares for lost nodes.

    The run's own nodes may be cordoned, because the run only continues there.
    """
    own = {row.node for row in group.nodes if not row.leaving and not row.lost}
    further = of_run(group.id, listed)[: len(missed(group))]
    names = own.union(further)
    return [{**node, "cordoned": None, "spare_of": None} for node in listed if node["id"] in names]
