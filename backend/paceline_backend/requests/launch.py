"""Records a new run, and lets its backend start it."""

from __future__ import annotations

import logging
from dataclasses import replace

import redis

from paceline.wire import State
from paceline_backend import backends
from paceline_backend.requests import streams
from paceline_backend.requests.errors import ConflictError, InvalidRequestError, check_policy
from paceline_backend.store import Store, new_runs, nodes, runs
from paceline_backend.store.new_runs import NewRun

logger = logging.getLogger(__name__)


def launch(store: Store, bus_url: str, new: NewRun, by: str, *, start: bool) -> str:
    """Records a run; its public id.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        new: the run.
        by: who asks.
        start: whether the control plane starts it; else who asks does.

    Raises:
        InvalidRequestError: the policy or another field is wrong.
        ConflictError: no node can start it.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.

    A run that was recorded and then not started, for whatever reason, has failed with that reason.
    """
    check_policy(new.policy, new.parameters, new.nproc)
    backend = backends.get(new.backend)
    try:
        backend.check(new, launch=start)
    except backends.NewRunError as error:
        raise InvalidRequestError(error.field, error.message) from error
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            if start:
                new = replace(new, node=_place(backend, new, nodes.listed(connection)))
            run = new_runs.create(connection, new, by)
        if start:
            try:
                backend.start(bus, run, new)
            except Exception as error:
                logger.error("run %s was not launched: %s", run, _reason(error))
                with store.write() as connection:
                    runs.end(connection, run, State.FAILED, _reason(error))
                streams.tell_end(bus, run)
                raise
    return run


def _reason(error: Exception) -> str:
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return "the bus went away before its launch"
    words = f"it could not be launched: {type(error).__name__}: {error}"
    return words.encode(errors="backslashreplace").decode()


def _place(backend: backends.Backend, new: NewRun, nodes: list[dict[str, object]]) -> str | None:
    try:
        return backend.place(new, nodes)
    except backends.NoNodeError as error:
        raise ConflictError(str(error)) from error
