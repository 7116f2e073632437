"""Launch of new runs: record a run, and let its backend start it.

If a recorded run cannot be started, its state becomes `failed`, with the error as its message.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace

import redis

from paceline.core import logs
from paceline.wire import Kill, State
from paceline_backend import backends
from paceline_backend.requests import sessions, spares, streams
from paceline_backend.requests.errors import (
    ConflictError,
    InvalidRequestError,
    backend_of,
    check_driver,
    check_start,
)
from paceline_backend.requests.stop import kill
from paceline_backend.store import Store, new_runs, nodes, runs
from paceline_backend.store.audit import Requester, record
from paceline_backend.store.new_runs import NewRun

logger = logging.getLogger(__name__)


def launch(store: Store, bus_url: str, new: NewRun, by: Requester, *, start: bool) -> str:
    """Record a run, start it if `start` is set, and return its public id.

    Without `start`, the caller starts the run's processes.

    Raises:
        ConflictError: no node can start the run.
    """
    logs.hide_environment(new.env)
    check_start(new.policy, new.parameters, new.most_ranks)
    spares.check(new, start=start)
    backend = backend_of(new.backend)
    if backend.plans_itself and new.restart_hung_s is not None:
        raise InvalidRequestError("restart_hung_s", "ranks of a simulated run cannot hang: omit it")
    check_driver(new)
    try:
        backend.check(new, launch=start)
    except backends.NewRunError as error:
        raise InvalidRequestError(error.field, error.message) from error
    if isinstance(backend, backends.Engine):
        new = replace(
            new, has_jobs=True, backend_options={"server": new.server, **new.backend_options}
        )
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            listed = nodes.listed(connection)
            if start:
                new = placed(backend, new, listed)
            run = new_runs.create(connection, new, by.name)
            spares.hold(connection, run, new, listed, all_=True)
            record(connection, by, "run.create", run=run, revision=0, details=_logged(new, start))
        if start:
            start_recorded(store, bus_url, bus, run, new)
    return run


def _logged(new: NewRun, start: bool) -> dict[str, object]:
    # Leave out arguments and environment variables, because they may hold secrets.
    names = ["name", "script", "nproc", "policy", "node", "backend", "max_restarts"]
    if new.nodes_max > 1:
        names += ["nodes_min", "nodes_max", "nodes", "spares", "replace_slow_nodes", "join_check"]
    if new.restart_hung_s is not None:
        names += ["restart_hung_s"]
    if new.has_jobs:
        names += ["backend_options"]
    return {name: getattr(new, name) for name in names} | {"launch": start}


def start_recorded(store: Store, bus_url: str, bus: redis.Redis, run: str, new: NewRun) -> None:
    """Start a recorded run, and kill its processes if it was stopped meanwhile."""
    with _not_launched(store, bus, run):
        made = credentials(store, bus_url, run, new)
        backend_of(new.backend).start(bus, run, new, made)
    # An order to stop that preceded the launch reached no process, so repeat it.
    if runs.get(store, run)["state"] == State.STOPPED:
        order = Kill("stopped before it started", new.first_attempt)
        # If this fails, the agent reports that the run is active, and a user can stop it again.
        with contextlib.suppress(redis.RedisError):
            kill(store, bus, run, new.where, order)


@contextlib.contextmanager
def _not_launched(store: Store, bus: redis.Redis, run: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        logger.error("run %s was not launched: %s", run, _reason(error))
        with store.write() as connection:
            runs.end(connection, run, State.FAILED, _reason(error))
        streams.tell_end(bus, run)
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return "the bus became unreachable before its launch"
    words = f"it could not be launched: {type(error).__name__}: {error}"
    return words.encode(errors="backslashreplace").decode()


def placed(backend: backends.Backend, new: NewRun, nodes: list[dict[str, object]]) -> NewRun:
    """Return the run with the nodes that its backend chose; `signed` is set if they have sessions.

    Raises:
        ConflictError: no node can start the run.
    """
    try:
        chosen = backend.place(new, nodes)
    except backends.NoNodeError as error:
        raise ConflictError(str(error)) from error
    signed = new.has_jobs or any(node["id"] in chosen and node["signed"] for node in nodes)
    if new.nodes_max > 1:
        return replace(new, node=None, nodes=chosen, signed=signed)
    return replace(new, node=next(iter(chosen), None), signed=signed)


def credentials(store: Store, bus_url: str, run: str, new: NewRun) -> backends.Credentials:
    """Return the credentials that the run's backend may pass to the processes that it starts."""
    session = sessions.credentials(store, bus_url, run) if new.signed else None
    return backends.Credentials(
        sessions.keys(store, new.where),
        session.bus if session else bus_url,
    )
