"""Has ranks that hold up a run ended, so that all start again."""

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
    """Has the agents kill ranks; TorchElastic then starts all again, or gives up. Idempotent.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        run: public id.
        attempt: of the ranks; another is left alone.
        ranks: that hold up the others.
        by: who asks; why: how the run hangs, in words.

    Returns:
        Whether the order was given: not if the attempt is over.

    Raises:
        redis.RedisError: the bus is away; whoever asked may ask again.
        StoreError: or one of its kinds.
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
    """Tells whoever looks after the run; a node ends those of the ranks that it has."""
    for node in nodes:
        key = keys.of_node(node)
        publish(bus, commands(node), order, run, maxlen=COMMANDS_LENGTH, key=key)
    # `paceline run` does not read what the node's agent is told.
    publish(bus, control(run), order, run, maxlen=CONTROL_LENGTH, key=keys.of_run(run))
