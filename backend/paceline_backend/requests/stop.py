"""Stops a run."""

from __future__ import annotations

from collections.abc import Collection

import redis

from paceline.wire import (
    COMMANDS_LENGTH,
    CONTROL_LENGTH,
    OBSERVED,
    Kill,
    State,
    StopTraining,
    commands,
    control,
)
from paceline.wire.bus import publish
from paceline_backend.requests import sessions, streams
from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Store, jobs, runs
from paceline_backend.store.audit import RequestedChange, record_change


def stop(
    store: Store,
    bus_url: str,
    change: RequestedChange,
    why: str,
    *,
    force: bool = False,
) -> None:
    """Stops a run at its next segment; with `force`, or before it trains, its processes now.

    An observed run has no segments: its processes end now.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        change: the run, and who asks.
        why: in words, for ranks and agent.
        force: does not wait for the segment's end.

    Raises:
        UnknownRunError: no such run.
        ConflictError: it has ended, or has no agent that could end its processes.
        RevisionError: the run has another revision than expected.
        redis.RedisError: the bus is away. If that comes after the ping, the audit log has the stop,
            and whoever asked may ask again. A run that had not begun is stopped then, until its
            agent tells that it started the run all the same.
        StoreError: or one of its kinds.
    """
    run = change.run
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            known = runs.launched(connection, run)
            state, where = State(known.state), known.nodes
            force |= known.policy == OBSERVED  # no rank follows a plan that could end
            details = {"force": force, "state": state}
            _refuse(run, state, where, force)
            record_change(connection, change, "run.stop", details)
            # The launch may be lost with an agent that died: nobody else would ever end the run.
            trains = state is State.RUNNING
            ends = not trains and (state in jobs.WAITING or not where)
            if ends:
                message, lost = "stopped before it started", bool(where)
                runs.end(connection, run, State.STOPPED, message, lost=lost)
        # After the transaction: a bus that hangs must not hold up others that write.
        if (force or not trains) and where:
            kill(store, bus, run, where, Kill(why, known.first_attempt))
        if trains:
            order = StopTraining(why, known.first_attempt)
            publish(bus, control(run), order, run, key=sessions.keys(store).of_run(run))
        if ends:
            streams.tell_end(bus, run)


def _refuse(run: str, state: State, where: Collection[str], force: bool) -> None:
    if state.final:
        raise ConflictError(f"run {run} has ended already: {state}")
    if state is State.RUNNING and force and not where:
        raise ConflictError(f"run {run} has no agent to end it; stop it without force")


def kill(store: Store, bus: redis.Redis, run: str, nodes: Collection[str], order: Kill) -> None:
    """Has a run's processes ended by who looks after them.

    Raises:
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    keys = sessions.keys(store, nodes)
    for node in nodes:
        of_node = keys.of_node(node)
        publish(bus, commands(node), order, run, maxlen=COMMANDS_LENGTH, key=of_node)
    # `paceline run` does not read what the node's agent is told.
    publish(bus, control(run), order, run, maxlen=CONTROL_LENGTH, key=keys.of_run(run))
