"""Stop of a run, and the killing of its ranks that hang."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import redis

from paceline.wire import (
    COMMANDS_LENGTH,
    CONTROL_LENGTH,
    OBSERVED,
    EndRanks,
    Kill,
    State,
    StopTraining,
    commands,
    control,
)
from paceline.wire.bus import publish
from paceline.wire.states import WAITING
from paceline_backend.requests import sessions, streams
from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Store, runs
from paceline_backend.store.audit import RequestedChange, Requester, record_change
from paceline_backend.store.nodes import hanging


def stop(
    store: Store,
    bus_url: str,
    change: RequestedChange,
    why: str,
    *,
    force: bool = False,
) -> None:
    """Stop a run at the end of its current segment, or kill its processes at once.

    The processes are killed if `force` is set, if the run does not train yet, or if it is observed,
    because an observed run has no segments. Ranks and agents log `why`.

    Raises:
        ConflictError: the run has ended, or has no agent that could kill its processes.
        redis.RedisError: the bus is unavailable. It is pinged before anything is written. If it
            fails only after this ping, the stop is already in the audit log, and the caller may
            retry. In this case, a run that had not started counts as stopped, unless its agent
            reports that it has started the run nevertheless.
    """
    run = change.run
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            known = runs.launched(connection, run)
            state, where = State(known.state), known.nodes
            force |= known.policy == OBSERVED
            details = {"force": force, "state": state}
            _refuse(run, state, where, force)
            record_change(connection, change, "run.stop", details)
            # This request itself ends a run that has not started yet: if the run's agent has died
            # and the launch is lost, nothing else would end the run.
            trains = state is State.RUNNING
            ends = not trains and (state in WAITING or not where)
            if ends:
                message, lost = "stopped before it started", bool(where)
                runs.end(connection, run, State.STOPPED, message, lost=lost)
        # Publish after the transaction, so that a bus that hangs cannot block other writers.
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


def end_hung(
    store: Store, bus_url: str, run: str, attempt: int, ranks: Sequence[int], by: Requester
) -> bool:
    """Order agents to kill ranks. TorchElastic then restarts all ranks, or gives up. Idempotent.

    Ranks of other attempts than `attempt` are left alone. `by.why` describes the hang in words.
    After a `redis.RedisError` the caller may repeat the call.

    Returns:
        True if the order was given, False if the attempt has ended.
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
        kill(store, bus, run, where, EndRanks(attempt, list(ranks), by.why))
    return True


def kill(
    store: Store, bus: redis.Redis, run: str, nodes: Collection[str], order: Kill | EndRanks
) -> None:
    """Order agents and `paceline run` to kill a run's processes or some of its ranks."""
    keys = sessions.keys(store, nodes)
    for node in nodes:
        of_node = keys.of_node(node)
        publish(bus, commands(node), order, run, maxlen=COMMANDS_LENGTH, key=of_node)
    # `paceline run` does not read the commands of the node's agent, only the control stream of its
    # run.
    publish(bus, control(run), order, run, maxlen=CONTROL_LENGTH, key=keys.of_run(run))
