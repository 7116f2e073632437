"""Kill of the ranks that block a hung run, after which TorchElastic restarts all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from paceline.wire import COMMANDS_LENGTH, CONTROL_LENGTH, EndRanks, commands, control
from paceline.wire.bus import publish
from paceline_backend.requests import sessions, streams
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, runs
from paceline_backend.store.audit import RequestedChange, Requester, record_change
from paceline_backend.store.nodes import hanging


def end_hung(
    store: Store, bus_url: str, run: str, attempt: int, ranks: Sequence[int], by: Requester
) -> bool:
    """Order agents to kill ranks. TorchElastic then restarts all ranks, or gives up. Idempotent.

    Ranks of other attempts than `attempt` are left alone. `by.why` describes the hang in words.
    After a `redis.RedisError` the caller may repeat the call.

    Returns:
        True if the order was given, False if the attempt is over.
    """
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            noted = hanging.note_end(connection, run, attempt)
            if noted is None:
                return False
            if noted:
                details = {"attempt": attempt, "ranks": list(ranks)}
                record_change(connection, RequestedChange(run, by), "run.restart-hung", details)
            where = runs.launched(connection, run).nodes
        _order(bus, sessions.keys(store, where), run, where, EndRanks(attempt, list(ranks), by.why))
    return True


def _order(bus: redis.Redis, keys: Keys, run: str, nodes: Sequence[str], order: EndRanks) -> None:
    for node in nodes:
        key = keys.of_node(node)
        publish(bus, commands(node), order, run, maxlen=COMMANDS_LENGTH, key=key)
    # `paceline run` does not read the commands of the node's agent.
    publish(bus, control(run), order, run, maxlen=CONTROL_LENGTH, key=keys.of_run(run))
