"""REST: the server, its nodes and policies, runs and what may be done to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import PurePath
from typing import Annotated, Any

import redis
from fastapi import APIRouter, Query, Request

from paceline.core.version import __version__
from paceline.wire import (
    ENDED,
    PROTOCOL_VERSION,
    Kill,
    Launch,
    StopTraining,
    SwitchRequested,
    commands,
    control,
    live,
)
from paceline.wire.bus import connect, publish
from paceline_backend import policies
from paceline_backend.api import models
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.requests import streams
from paceline_backend.server.settings import Settings
from paceline_backend.simulator.scenario import Scenario, ScenarioError
from paceline_backend.store import Connection, Store, switches
from paceline_backend.store import runs as runs_store

router = APIRouter()

_NOT_FOUND = HTTPStatus.NOT_FOUND
_CONFLICT = HTTPStatus.CONFLICT
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_AWAY = HTTPStatus.SERVICE_UNAVAILABLE


def store_of(request: Request) -> Store:
    """The application's store."""
    store: Store = request.app.state.store
    return store


def settings_of(request: Request) -> Settings:
    """The application's settings."""
    settings: Settings = request.app.state.settings
    return settings


@contextlib.contextmanager
def _bus(request: Request) -> Iterator[redis.Redis]:
    """A bus that answers: asked before anything is written, so that nothing is left half done.

    Raises:
        redis.RedisError: it does not answer.
    """
    with connect(settings_of(request).bus) as client:
        client.ping()
        yield client


def _checked(policy: str, parameters: Mapping[str, Any], world: int) -> None:
    try:
        policies.make(policy, parameters, world)
    except policies.UnknownPolicyError as error:
        extra = {"suggestion": error.suggestion} if error.suggestion else {}
        errors = [{"field": "policy", "message": str(error)}]
        raise ProblemError(_INVALID, str(error), errors=errors, **extra) from error
    except ValueError as error:
        errors = [{"field": "parameters", "message": str(error)}]
        raise ProblemError(_INVALID, str(error), errors=errors) from error


@router.get("/version")
def version(request: Request) -> models.Version:
    """Release, message protocol, which control plane this is, and where agents find its bus."""
    return models.Version(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        id=request.app.state.control_id,
        bus=settings_of(request).bus,
    )


@router.get("/policies")
def list_policies() -> list[models.PolicyInfo]:
    """All registered presets."""
    return [_policy_info(policies.get(name)) for name in policies.names()]


def _policy_info(preset: policies.Preset) -> models.PolicyInfo:
    changes = policies.make(preset.name).changes
    changes_with: dict[str, dict[str, policies.Changes]] = {}
    for parameter, schema in preset.parameters.items():
        for value in schema.get("enum", ()):
            with_value = policies.make(preset.name, {parameter: value}).changes
            if with_value != changes:
                changes_with.setdefault(parameter, {})[str(value)] = with_value
    return models.PolicyInfo(
        name=preset.name,
        summary=preset.summary,
        source=preset.source,
        parameters={name: dict(schema) for name, schema in preset.parameters.items()},
        changes=changes,
        changes_with=changes_with,
    )


@router.get("/nodes", response_model=list[models.Node])
def list_nodes(request: Request) -> Any:
    """All nodes that ever registered, those that answer first."""
    with store_of(request).read() as connection:
        return runs_store.nodes_now(connection)


@router.post(
    "/runs",
    status_code=HTTPStatus.CREATED,
    response_model=models.Run,
    responses=documented(_CONFLICT, _INVALID, _AWAY),
)
def create_run(request: Request, body: models.RunCreate) -> Any:
    """Records a run and, with `launch`, tells a node's agent to start it."""
    _checked(body.policy, body.parameters, body.nproc)
    _check_scenario(body)
    store = store_of(request)
    with _bus(request) as bus:
        with store.write() as connection:
            node = _node_for(connection, body) if body.launch else body.node
            new = runs_store.NewRun(
                name=body.name or PurePath(body.script).stem or body.script,
                node=node,
                **body.model_dump(exclude={"name", "node", "launch"}),
            )
            run = runs_store.create(connection, new, by="api")
        if node is not None and body.launch:
            message = Launch(
                body.script, body.args, body.nproc, body.env, body.cwd, body.max_restarts
            )
            try:
                publish(bus, commands(node), message, run, maxlen=streams.COMMANDS_LENGTH)
            except redis.RedisError:
                with store.write() as connection:
                    runs_store.end(connection, run, "failed", "the bus went away before its launch")
                with contextlib.suppress(redis.RedisError):
                    streams.tell_end(bus, run)
                raise
    return runs_store.get(store, run)


def _check_scenario(body: models.RunCreate) -> None:
    def refuse(field: str, message: str) -> ProblemError:
        errors = [{"field": field, "message": message}]
        return ProblemError(_INVALID, f"{field}: {message}", errors=errors)

    if body.backend != "simulated":
        if body.scenario is not None:
            raise refuse("scenario", 'only for backend "simulated"')
        return
    if body.launch:
        raise refuse("launch", "give false and run `paceline simulate SCENARIO --server URL`")
    if body.scenario is None:
        raise refuse("scenario", "give what to simulate; docs/simulator.md tells how")
    try:
        scenario = Scenario.of(body.scenario)
    except ScenarioError as error:
        raise refuse("scenario", str(error)) from error
    if scenario.workers != body.nproc:
        raise refuse("nproc", f"{body.nproc}, but the scenario has {scenario.workers} workers")


def _node_for(connection: Connection, body: models.RunCreate) -> str:
    alive = [node for node in runs_store.nodes_now(connection) if node["alive"]]
    if body.node is not None:
        if body.node not in {node["id"] for node in alive}:
            names = ", ".join(node["id"] for node in alive) or "none"
            raise ProblemError(
                _CONFLICT, f"node: {body.node} has no agent that answers; alive are: {names}"
            )
        return body.node
    if not alive:
        raise ProblemError(
            _CONFLICT,
            "no agent answers: start one with `paceline agent` on the machine that shall train, "
            "or use `paceline run`",
        )
    return str(min(alive, key=lambda node: (len(node["runs"]), -node["cores"]))["id"])


@router.get("/runs", response_model=models.RunPage, responses=documented(_INVALID))
def list_runs(
    request: Request,
    state: Annotated[list[models.State], Query(description="any of these")] = [],  # noqa: B006
    policy: Annotated[str | None, Query(description="exactly")] = None,
    name: Annotated[str | None, Query(description="a part of it")] = None,
    since: Annotated[float | None, Query(description="created at this Unix time or later")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before")] = None,
) -> Any:
    """Runs, newest first."""
    try:
        items, following = runs_store.page(
            store_of(request),
            states=state,
            policy=policy,
            name=name,
            since=since,
            limit=limit,
            cursor=cursor,
        )
    except runs_store.CursorError as error:
        errors = [{"field": "cursor", "message": str(error)}]
        raise ProblemError(_INVALID, str(error), errors=errors) from error
    return {"items": items, "next_cursor": following}


@router.get("/runs/{run}/scenario", responses=documented(_NOT_FOUND))
def get_scenario(request: Request, run: str) -> dict[str, Any] | None:
    """What a simulated run simulates; null of another."""
    with store_of(request).read() as connection:
        return runs_store.scenario(connection, run)


@router.get("/runs/{run}", response_model=models.Run, responses=documented(_NOT_FOUND))
def get_run(request: Request, run: str) -> Any:
    """One run."""
    return runs_store.get(store_of(request), run)


@router.post(
    "/runs/{run}/stop",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.Run,
    responses=documented(_NOT_FOUND, _CONFLICT, _AWAY),
)
def stop_run(request: Request, run: str, body: models.Stop | None = None) -> Any:
    """Stops a run at its next segment; with `force`, or before it trains, its processes now."""
    force = body is not None and body.force
    store = store_of(request)
    found = runs_store.get(store, run)
    if found["state"] in ENDED:
        raise ProblemError(_CONFLICT, f"run {run} has ended already: {found['state']}")
    trains = found["state"] == "running"
    if trains and force and found["node"] is None:
        raise ProblemError(_CONFLICT, f"run {run} has no agent to end it; stop it without force")
    with _bus(request) as bus:
        if (force or not trains) and found["node"] is not None:
            order = Kill("stopped over the API")
            publish(bus, commands(found["node"]), order, run, maxlen=streams.COMMANDS_LENGTH)
        if trains:
            publish(bus, control(run), StopTraining("stopped over the API"), run)
        elif found["state"] == "pending" or found["node"] is None:
            # Its launch may be lost with an agent that died: nobody else would ever end it.
            with store.write() as connection:
                runs_store.end(connection, run, "stopped", "stopped before it started")
            streams.tell_end(bus, run)
    return runs_store.get(store, run)


@router.post(
    "/runs/{run}/policy",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.Switch,
    responses=documented(_NOT_FOUND, _CONFLICT, _INVALID, _AWAY),
)
def switch_policy(request: Request, run: str, body: models.PolicySwitch) -> Any:
    """Requests another policy; it plans from the next segment on."""
    with _bus(request) as bus:
        known = runs_store.get(store_of(request), run)
        _checked(body.policy, body.parameters, known["world"] or known["nproc"])
        with store_of(request).write() as connection:
            made = switches.add(connection, run, body.policy, body.parameters, body.by)
        message = SwitchRequested(made["version"], body.policy, made["requested_at"])
        publish(bus, live(run), message, run, maxlen=streams.LIVE_LENGTH)
    return made


@router.get(
    "/runs/{run}/switches",
    response_model=list[models.Switch],
    responses=documented(_NOT_FOUND),
)
def list_switches(request: Request, run: str) -> Any:
    """Every policy that was asked for, and since when it plans."""
    return switches.rows(store_of(request), run)
