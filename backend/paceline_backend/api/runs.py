"""REST: the server, its nodes and policies, and runs: start, stop, resume."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from pathlib import PurePath
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from paceline.core.version import __version__
from paceline.wire import PROTOCOL_VERSION
from paceline.wire.bus import at_host, without_password
from paceline_backend import policies, requests
from paceline_backend.api import models
from paceline_backend.api.audit import CHANGE_REFUSALS, Expected, etag, requester_of
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.rules import OPERATOR, VIEWER, allow
from paceline_backend.insight import costs
from paceline_backend.insight.reuse import Reused
from paceline_backend.policies.streams import problem_of
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, attempts, nodes, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.new_runs import NewRun

router = APIRouter()

_MALFORMED = HTTPStatus.BAD_REQUEST
_CONFLICT = HTTPStatus.CONFLICT
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_AWAY = HTTPStatus.SERVICE_UNAVAILABLE


def store_of(request: Request) -> Store:
    """Return the application's store."""
    store: Store = request.app.state.store
    return store


def reused_of(request: Request) -> Reused:
    """Return the application's cache of results."""
    reused: Reused = request.app.state.reused
    return reused


def settings_of(request: Request) -> Settings:
    """Return the application's settings."""
    settings: Settings = request.app.state.settings
    return settings


def with_costs(request: Request, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of runs with the cost of each run."""
    price = settings_of(request).hour_price
    return [{**row, "cost": costs.of_run(row["figures"], row["backend"], price)} for row in rows]


def own_url(request: Request) -> str:
    """Return this server's URL for ranks: host as in the request, with a proxy's path prefix."""
    return str(request.base_url).rstrip("/") + settings_of(request).path_prefix


@router.get("/version", dependencies=[Depends(allow("viewer", "agent"))])
def version(request: Request) -> models.Version:
    """Return the release, the protocol version, the control plane's ID, and the URL of its bus.

    The URL includes the password only for an admin's token.
    """
    bus = _bus(request, settings_of(request).bus)
    return models.Version(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        id=request.app.state.control_id,
        bus=bus if identity_of(request).scope == "admin" else without_password(bus),
    )


def _bus(request: Request, url: str) -> str:
    """Return the URL of the bus for the caller. The embedded bus listens on the server's host."""
    host = request.url.hostname
    return at_host(url, host) if settings_of(request).trust_network and host else url


@router.get("/me", dependencies=[Depends(allow("viewer", "agent"))])
def me(request: Request) -> models.Me:
    """Return the caller's name and role."""
    identity = identity_of(request)
    return models.Me(name=identity.name, scope=identity.scope, shared=identity.shared)


@router.get("/policies", dependencies=[Depends(VIEWER)])
def list_policies() -> list[models.PolicyInfo]:
    """List all registered presets."""
    return [_policy_info(policies.get(name)) for name in policies.names()]


def _policy_info(preset: policies.Preset[Any]) -> models.PolicyInfo:
    changes = policies.make(preset.name).changes
    changes_with: dict[str, dict[str, policies.Changes]] = {}
    schemas = policies.properties(preset.parameters)
    for parameter, schema in schemas.items():
        for value in schema.get("enum", ()):
            with_value = policies.make(preset.name, {parameter: value}).changes
            if with_value != changes:
                changes_with.setdefault(parameter, {})[str(value)] = with_value
    return models.PolicyInfo(
        name=preset.name,
        summary=preset.summary,
        source=preset.source,
        parameters={name: dict(schema) for name, schema in schemas.items()},
        changes=changes,
        changes_with=changes_with,
    )


@router.get(
    "/nodes",
    response_model=list[models.NodeInfo],
    responses=documented(_AWAY),
    dependencies=[Depends(VIEWER)],
)
def list_nodes(request: Request) -> Any:
    """List all nodes that ever registered. Nodes whose agent answers come first."""
    with store_of(request).read() as connection:
        return nodes.listed(connection)


@router.post(
    "/nodes/{node}/session",
    responses=documented(_CONFLICT, _INVALID, _AWAY),
    dependencies=[Depends(allow("agent"))],
)
def create_node_session(request: Request, node: str) -> models.NodeSession:
    """Return credentials for a node's agent; only their holder can act as the node from then on."""
    only = identity_of(request).node
    if only is not None and only != node:
        message = f"this token is for the node {only}: create another for {node} with --node {node}"
        raise ProblemError(HTTPStatus.FORBIDDEN, message)
    who, store = identity_of(request), store_of(request)
    token = who.token or None
    made = requests.sessions.of_node(store, settings_of(request).bus, node, token, who.run)
    bus = _bus(request, made.bus)
    return models.NodeSession(id=request.app.state.control_id, bus=bus, key=made.key.hex())


@router.post(
    "/runs/{run}/session",
    responses={**RUN_REFUSALS, **documented(_CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def create_run_session(request: Request, run: str) -> models.RunSession:
    """Return credentials for a run that its caller starts; only their holder can act as the run."""
    made = requests.sessions.of_run(store_of(request), settings_of(request).bus, run)
    return models.RunSession(bus=_bus(request, made.bus), key=made.key.hex())


@router.post(
    "/runs",
    status_code=HTTPStatus.CREATED,
    response_model=models.RunInfo,
    responses=documented(_MALFORMED, _CONFLICT, _INVALID, _AWAY),
    dependencies=[Depends(OPERATOR)],
)
def create_run(request: Request, body: models.RunCreate) -> Any:
    """Create a run. With `launch`, ask a node's agent or an engine to start it."""
    store = store_of(request)
    new = NewRun(
        name=body.name or PurePath(body.script).stem or body.script,
        **body.model_dump(exclude={"name", "launch"}),
        server=own_url(request),
    )
    by = requester_of(request)
    run = requests.launch(store, settings_of(request).bus, new, by, start=body.launch)
    return runs_store.get(store, run)


@router.get("/runs/{run}/scenario", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])
def get_scenario(request: Request, run: str) -> dict[str, Any] | None:
    """Return the scenario of a simulated run; null for any other run."""
    with store_of(request).read() as connection:
        return runs_store.scenario(connection, run)


@router.get(
    "/runs/{run}",
    response_model=models.RunInfo,
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def get_run(request: Request, response: Response, run: str) -> Any:
    """Return a run. Its `ETag` is for the `If-Match` of a change."""
    [row] = with_costs(request, [runs_store.get(store_of(request), run)])
    row["notice"] = row["notice"] or _unsuited(store_of(request), row)
    response.headers["ETag"] = etag(row["revision"])
    return row


def _unsuited(store: Store, run: Mapping[str, Any]) -> str | None:
    """Return why the run's policy cannot plan it; None: it can, or is unknown to this server."""
    streamed = run["attempt"] is not None and run["samples"] is None
    if run["token_budget"] is None and not streamed:
        return None
    with store.read() as connection:
        switch = switches.latest(connection, runs_store.key_of(connection, run["id"]))
    try:
        made = policies.make(switch.policy, switch.parameters)
    except ValueError:
        return None
    reason = problem_of(made) if streamed else policies.unsuited(made, run["token_budget"])
    return None if reason is None else f"It trains as plain DDP: {reason}."


@router.post(
    "/runs/{run}/stop",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.RunInfo,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def stop_run(
    request: Request, run: str, expected: Expected, body: models.Stop | None = None
) -> Any:
    """Stop a run at its next segment.

    With `force`, or if the run does not train yet, end its processes now.
    """
    body = body or models.Stop()
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why, body.operator)
    why = "stopped over the API"
    requests.stop(store, bus, RequestedChange(run, by, expected), why, force=body.force)
    return runs_store.get(store, run)


@router.post(
    "/runs/{run}/resume",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.RunInfo,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def resume_run(
    request: Request, run: str, expected: Expected, body: models.Resume | None = None
) -> Any:
    """Resume a run that failed or was stopped, usually from its newest checkpoint.

    The run may continue on another backend, and with other numbers of nodes and ranks.
    """
    body = body or models.Resume()
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why, body.operator)
    to = requests.Elsewhere(
        *(body.backend, body.backend_options, body.nodes_min, body.nodes_max, body.nproc),
        server=own_url(request),
    )
    terms = requests.Resumption(body.launch, body.max_restarts, to, body.env)
    requests.resume(store, bus, RequestedChange(run, by, expected), terms)
    return runs_store.get(store, run)


@router.get(
    "/runs/{run}/attempts",
    response_model=list[models.Attempt],
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_attempts(request: Request, run: str) -> Any:
    """List the first step of each attempt, and the steps that the attempt repeats."""
    with store_of(request).read() as connection:
        return attempts.starts(connection, runs_store.key_of(connection, run))
