"""Nodes that may have logs of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline_backend.requests import ConflictError
from paceline_backend.store import Store, nodes, runs
from paceline_backend.store.nodes import run_nodes


@dataclass(frozen=True)
class LogHolder:
    """A node that may have logs of a run.

    `alive`: its agent answers. `signed`: its agent has a session on the bus.
    """

    node: str
    alive: bool
    signed: bool


def holders(
    store: Store, run: str, rank: int | None = None, attempt: int | None = None
) -> list[LogHolder]:
    """Return the nodes that may have a log, sorted by name.

    Args:
        store: the database.
        run: public ID.
        rank: rank that wrote the log; None: logs of all ranks and of launchers.
        attempt: attempt of the log; None: the newest that has one.

    Raises:
        UnknownRunError: no such run.
        ConflictError: the rank has no log of its own.
    """
    row = runs.get(store, run)
    if row["driver"] and rank:
        raise ConflictError(
            f"run {run}: its script starts the ranks itself, so only rank 0 has a log, with the "
            "output of the script and, on Ray, of the workers"
        )
    with store.read() as connection:
        key = runs.key_of(connection, run)
        several = run_nodes.of_runs(connection, [key])[key] if row["nodes_max"] > 1 else []
        known = {node["id"]: node for node in nodes.listed(connection)}
    names = {each.node for each in several} | ({row["node"]} - {None})
    if attempt is None:
        attempt = max((each.attempt for each in several), default=None)
    if rank is not None and len(names) > 1 and attempt is not None and attempt == row["attempt"]:
        placed = _placement(store, key, attempt)
        names = names.intersection(placed[rank : rank + 1]) or names
    return [_holder(name, known.get(name)) for name in sorted(names)]


def _holder(name: str, node: dict[str, Any] | None) -> LogHolder:
    # The node is unknown if the user started `paceline run` there, without an agent.
    if node is None:
        return LogHolder(name, alive=False, signed=False)
    return LogHolder(name, alive=node["alive"], signed=node["signed"])


@lru_cache(maxsize=1024)
def _placement(store: Store, key: int, attempt: int) -> tuple[str, ...]:
    """Return each rank's node, from the leader's Hello. It is cached because a Hello is long."""
    with store.read() as connection:
        message = runs.hello(connection, key)
    return () if message is None or message.attempt != attempt else tuple(message.placement)
