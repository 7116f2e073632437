"""Stops a run."""

from __future__ import annotations

from paceline.wire import COMMANDS_LENGTH, Kill, State, StopTraining, commands, control
from paceline.wire.bus import publish
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError
from paceline_backend.store import Store, runs


def stop(store: Store, bus_url: str, run: str, why: str, *, force: bool = False) -> None:
    """Stops a run at its next segment; with `force`, or before it trains, its processes now.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        run: the run's public id.
        why: in words.
        force: does not wait for the segment's end.

    Raises:
        UnknownRunError: no such run.
        ConflictError: it has ended, or has no agent that could end its processes.
        redis.RedisError: the bus is away; nothing was stored.
        StoreError: or one of its kinds.
    """
    known = runs.get(store, run)
    state, node = State(known["state"]), known["node"]
    trains = state is State.RUNNING
    if state.final:
        raise ConflictError(f"run {run} has ended already: {state}")
    if trains and force and node is None:
        raise ConflictError(f"run {run} has no agent to end it; stop it without force")
    with streams.answering(bus_url) as bus:
        if (force or not trains) and node is not None:
            publish(bus, commands(node), Kill(why), run, maxlen=COMMANDS_LENGTH)
        if trains:
            publish(bus, control(run), StopTraining(why), run)
        elif state is State.PENDING or node is None:
            # The launch may be lost with an agent that died: nobody else would ever end the run.
            with store.write() as connection:
                runs.end(connection, run, State.STOPPED, "stopped before it started")
            streams.tell_end(bus, run)
