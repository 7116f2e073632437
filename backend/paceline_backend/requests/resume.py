"""Resume of a run that failed or was stopped, with the same settings or with other ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.core import driver, logs
from paceline.wire import State
from paceline_backend import backends
from paceline_backend.requests import spares, streams
from paceline_backend.requests.errors import (
    ConflictError,
    InvalidRequestError,
    backend_of,
    check_driver,
    check_start,
)
from paceline_backend.requests.launch import placed, start_recorded
from paceline_backend.store import (
    Connection,
    Store,
    jobs,
    new_runs,
    nodes,
    runs,
    segments,
    switches,
)
from paceline_backend.store.audit import RequestedChange, record_change
from paceline_backend.store.new_runs import NewRun


@dataclass(frozen=True)
class Elsewhere:
    """Changes to a run that is resumed. None keeps the present value.

    If the backend changes, `backend_options` of None means the backend's defaults. `nproc` is the
    number of ranks per node, and `server` the URL at which the caller reaches the control plane.
    """

    backend: str | None = None
    backend_options: Mapping[str, Any] | None = None
    nodes_min: int | None = None
    nodes_max: int | None = None
    nproc: int | None = None
    server: str = ""

    @property
    def asked(self) -> dict[str, Any]:
        """Return the fields that are not None, by name."""
        names = ("backend", "backend_options", "nodes_min", "nodes_max", "nproc")
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}


AS_BEFORE = Elsewhere()


def moved(connection: Connection, run: str, new: NewRun, to: Elsewhere, *, start: bool) -> NewRun:
    """Return the run `new` with the changes `to`.

    `start` is True if the control plane starts the run, and False if the caller does.

    Raises:
        InvalidRequestError: the backend does not accept the changed run.
        ConflictError: the run is adopted, and `to` names no backend. Or the run is on an engine,
            `to` is empty, and `start` is False.
    """
    if new.backend == backends.AdoptedBackend.name and to.backend is None:
        raise ConflictError(
            f"run {run}: its user started its nodes, and must restart them under another key; or "
            "name a backend on which the run should continue"
        )
    if not to.asked:
        if new.has_jobs and not start:
            raise ConflictError(
                f"run {run} is on {new.backend}, so only the control plane can start it: omit "
                "`launch`"
            )
        return replace(new, node=None, nodes=()) if new.has_jobs else new
    backend = backend_of(to.backend or new.backend)
    if backend.plans_itself:
        raise InvalidRequestError(
            "backend", f"{backend.name} cannot continue a run: it has no processes"
        )
    made = _changed(new, to, backend)
    try:
        backend.check(replace(made, node=None), launch=start)
    except backends.NewRunError as error:
        raise InvalidRequestError(error.field, error.message) from error
    now = switches.latest(connection, runs.key_of(connection, run))
    check_start(now.policy, now.parameters, made.most_ranks)
    return made


def _changed(new: NewRun, to: Elsewhere, backend: backends.Backend) -> NewRun:
    nodes_max = to.nodes_max or max(new.nodes_max, to.nodes_min or 1)
    made = replace(
        new,
        nproc=to.nproc or new.nproc,
        nodes_min=to.nodes_min or min(new.nodes_min, nodes_max),
        nodes_max=nodes_max,
    )
    engine, goes = isinstance(backend, backends.Engine), backend.name != new.backend
    if goes or engine or (made.nodes_max > 1) != (new.nodes_max > 1):
        made = replace(made, node=None, nodes=())
    if goes or to.backend_options is not None:
        server = {"server": to.server} if engine else {}
        made = replace(made, backend_options={**server, **(to.backend_options or {})})
    if backend.name != "local" or made.nodes_max == 1:
        # Only multi-node runs on backend `local` can have spares.
        made = replace(made, spares=0, replace_slow_nodes=False)
    return replace(made, backend=backend.name, has_jobs=engine)


# Attempt numbers must be below this limit, because the database stores them in 16 bits.
MOST_ATTEMPTS = 2**15
_EMULATE = "PACELINE_EMULATE"


@dataclass(frozen=True)
class Resumption:
    """Terms on which a run is resumed.

    If `start` is False, the caller starts the run's processes. `max_restarts` counts restarts from
    now on; None keeps the value.
    """

    start: bool
    max_restarts: int | None = None
    to: Elsewhere = AS_BEFORE
    # Values may be secrets, so the representation leaves them out.
    env: Mapping[str, str] = field(default_factory=dict, repr=False)


def resume(store: Store, bus_url: str, change: RequestedChange, terms: Resumption) -> None:
    """Make an ended run pending again with a new attempt, and start it if `terms.start` is set.

    The script continues from its newest checkpoint, if it declares checkpoints.

    Raises:
        ConflictError: the run has not ended, has finished or is simulated, or its node does not
            answer.
        InvalidRequestError: a variable has no value, or the new backend does not accept the run.
    """
    logs.hide_environment(terms.env)
    run = change.run
    with streams.answering(bus_url) as bus:
        with store.write() as connection:
            details = {
                "max_restarts": terms.max_restarts,
                "launch": terms.start,
                **terms.to.asked,
            }
            record_change(connection, change, "run.resume", details)
            new = _recorded(connection, run, terms)
            # Delete an earlier order to stop the run, so that the leader does not read it. Delete
            # it in the transaction, so that a later order to stop is kept.
            streams.forget_orders(bus, run)
        if terms.start:
            start_recorded(store, bus_url, bus, run, new)
        streams.tell_change(bus, run)


def _recorded(connection: Connection, run: str, terms: Resumption) -> NewRun:
    new, state = new_runs.stored(connection, run)
    _refuse(run, new, state)
    if state is State.FINISHED and not _stopped_early(connection, run):
        raise ConflictError(f"run {run} has finished: nothing is left to train; start another run")
    new = moved(connection, run, new, terms.to, start=terms.start)
    check_driver(new)
    if terms.max_restarts is not None:
        new = replace(new, max_restarts=terms.max_restarts)
    last = runs.last_attempt(new.first_attempt, new.max_restarts, new.nodes_max)
    if last >= MOST_ATTEMPTS:
        raise ConflictError(
            f"run {run} has had {new.first_attempt} attempts: a run has at most "
            f"{MOST_ATTEMPTS:,}; start another run"
        )
    listed = nodes.listed(connection)
    if terms.start:
        new = replace(new, env=environment(connection, run, new, terms.env))
        try:
            new = placed(backend_of(new.backend), new, listed)
        except ConflictError as error:
            raise ConflictError(
                f"{error}; to resume a run of `paceline run`, use `paceline resume {run}` on its "
                "machine"
            ) from error
        _refuse_agent(run, new)
    elif new.nodes_max > 1:
        # The caller chooses the nodes.
        new = replace(new, nodes=())
    spares.hold(connection, run, new, listed, all_=False)
    new_runs.resume(connection, run, new)
    if new.has_jobs:
        jobs.order_anew(connection, run, new.nodes_min, new.nodes_max, new.first_attempt)
    else:
        jobs.drop(connection, run)
    return new


def _refuse(run: str, new: NewRun, state: State) -> None:
    if not state.final:
        raise ConflictError(
            f"run {run} is {state}: only a run that failed or was stopped can be resumed"
        )
    if backends.plans_itself(new.backend):
        raise ConflictError(f"run {run} is simulated: only a run with processes can be resumed")
    if not new.script:
        raise ConflictError(f"run {run} has no known script: start it as another run")


def _refuse_agent(run: str, new: NewRun) -> None:
    """Refuse a node whose agent has no session. For multi-node runs, `placed` has checked this."""
    if not new.signed:
        raise ConflictError(
            f"node {new.node}: its agent has no session: start it with --server and a token, or "
            f"use `paceline resume {run}` on its machine"
        )


def _stopped_early(connection: Connection, run: str) -> bool:
    """Return True if a finished run has epochs left, because it was stopped gracefully."""
    key = runs.key_of(connection, run)
    hello = runs.hello(connection, key)
    return hello is not None and not segments.is_complete(connection, key, hello)


def environment(
    connection: Connection, run: str, new: NewRun, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the values of the run's environment variables, including those in `given`.

    Raises:
        InvalidRequestError: the value of a variable that the run was started with is not known.
    """
    known = {}
    hello = runs.hello(connection, runs.key_of(connection, run))
    if _EMULATE in new.env and hello is not None and hello.emulated is not None:
        known[_EMULATE] = json.dumps(hello.emulated)
    if driver.VARIABLE in new.env:
        known[driver.VARIABLE] = "1"
    env = {**known, **given}
    if missing := sorted(new.env.keys() - env.keys()):
        raise InvalidRequestError(
            "env",
            f"run {run} was started with values of {', '.join(missing)}, which are not stored: "
            "give them again",
        )
    return env
