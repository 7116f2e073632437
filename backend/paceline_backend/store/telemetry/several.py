"""Compute the state of a multi-node run from the reports of its nodes.

* If any node is in state `running`, the run is in state `running`.
* A node that ends while others continue changes only its own row.
* If all nodes have ended, the run has ended: see `outcome`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from paceline.wire import RunState, State
from paceline.wire.states import TransitionCause
from paceline_backend.store.nodes.run_nodes import RunNode

# Maximum number of lost nodes that a run's message names.
_NAMED = 8


def changes(row: RunNode, report: RunState) -> Mapping[str, Any]:
    """Return the columns that a report about the latest launch changes in a node's row."""
    before, after = State(row.state), report.state
    if before.final and not row.lost:
        return {}
    values: dict[str, Any] = {"reported_at": report.at, "attempt": max(row.attempt, report.attempt)}
    if row.lost:
        values |= {"lost": False, "state": after, "message": report.message}
    elif TransitionCause.REPORT.allows(before, after):
        values["state"] = after
    if report.message is not None:
        values["message"] = report.message
    if after.final:
        values["exit_code"] = report.exit_code
    if report.arrived:
        values["arrived"] = True
    if report.address:
        values |= {"address": report.address, "port": report.port}
    return {name: value for name, value in values.items() if getattr(row, name) != value}


def summed(rows: Sequence[RunNode], report: RunState) -> RunState | None:
    """Combine the states of all nodes of a launch into one report.

    `report` is the newest report of a node. Return None if all nodes have ended but the result is
    not known yet, because the rendezvous was lost (see `control.multi_node`).
    """
    active = {row.state for row in rows if not row.ended}
    if not active:
        return outcome(rows)
    state = State.RUNNING if State.RUNNING in active else State.STARTING
    attempt = max(row.attempt for row in rows)
    # The message of a node that has ended is stored only in the node's own row.
    message = None if report.state.final else _named(report.node, report.message)
    return RunState(state, report.at, report.node, attempt, message=message)


def outcome(rows: Collection[RunNode]) -> RunState | None:
    """Return the final state of a run whose nodes have all ended.

    Return None if the result is not known yet: nodes failed only because the rendezvous was lost,
    and no node finished.

    If a node failed, the run fails, unless other nodes continued without this node. Attempt numbers
    are the same on all nodes. So if a node finished or was stopped in a later attempt, it continued
    without the nodes that failed in an earlier attempt.
    """
    heard = [row for row in rows if not row.lost] or list(rows)
    finished = [row for row in heard if row.state == State.FINISHED]
    stopped = [row for row in heard if row.state == State.STOPPED]
    last = max((row.attempt for row in finished + stopped), default=-1)
    failed = [row for row in heard if row.state == State.FAILED and row.attempt >= last]
    if any(row.orphaned for row in failed):
        if not finished:
            return None
        failed = [row for row in failed if not row.orphaned]
    failed = [row for row in failed if not row.followed] or failed
    return ended(failed or finished or stopped, rows)


def ended(ends: Collection[RunNode], rows: Collection[RunNode]) -> RunState:
    """Return the final state of a run with the nodes `rows`; the nodes `ends` decide the result.

    The run gets state and message of the node in `ends` that ended first; if this node was lost,
    the message names all lost nodes. The run's end is the time at which the last of `rows` ended.
    """
    first = min(ends, key=lambda row: (row.reported_at or 0.0, row.node))
    at = max(row.reported_at or row.launched_at for row in rows)
    message = _named(first.node, first.message)
    if first.lost:
        message = _lost_message([row for row in ends if row.lost])
    return RunState(State(first.state), at, first.node, first.attempt, first.exit_code, message)


def _lost_message(lost: Collection[RunNode]) -> str:
    in_order = sorted(lost, key=lambda row: row.node)
    said = [_named(row.node, row.message) or row.node for row in in_order[:_NAMED]]
    more = len(in_order) - len(said)
    return "; ".join([*said, *([f"and {more} more nodes"] if more else [])])


def _named(node: str, message: str | None) -> str | None:
    return None if message is None else f"{node}: {message}"
