"""REST: the server, its nodes and policies, runs and what may be done to them."""

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
from paceline_backend.store.new_runs import NewRun

router = APIRouter()

_MALFORMED = HTTPStatus.BAD_REQUEST
_CONFLICT = HTTPStatus.CONFLICT
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_AWAY = HTTPStatus.SERVICE_UNAVAILABLE


def store_of(request: Request) -> Store:
    """The application's store."""
    store: Store = request.app.state.store
    return store


def reused_of(request: Request) -> Reused:
    """The application's answers that are given again."""
    reused: Reused = request.app.state.reused
    return reused


def settings_of(request: Request) -> Settings:
    """The application's settings."""
    settings: Settings = request.app.state.settings
    return settings


def with_costs(request: Request, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs as the store gives them, with what each of them cost."""
    price = settings_of(request).hour_price
    return [{**row, "cost": costs.of_run(row["figures"], row["backend"], price)} for row in rows]


def own_url(request: Request) -> str:
    """Where ranks reach this server, as the requester did: with the path prefix of a proxy."""
    return str(request.base_url).rstrip("/") + settings_of(request).path_prefix


@router.get("/version", dependencies=[Depends(allow("viewer", "agent"))])
def version(request: Request) -> models.Version:
    """Release, message protocol, which control plane this is, and where agents find its bus.

    Only for an admin's token has the bus's address its password.
    """
    bus = _bus(request, settings_of(request).bus)
    return models.Version(
        version=__version__,
        protocol=PROTOCOL_VERSION,
        id=request.app.state.control_id,
        bus=bus if identity_of(request).scope == "admin" else without_password(bus),
    )


def _bus(request: Request, url: str) -> str:
    """The URL of the bus for who asks: our own bus is where its caller has found us."""
    host = request.url.hostname
    return at_host(url, host) if settings_of(request).trust_network and host else url


@router.get("/me", dependencies=[Depends(allow("viewer", "agent"))])
def me(request: Request) -> models.Me:
    """Who asks, and what it may do."""
    identity = identity_of(request)
    return models.Me(name=identity.name, scope=identity.scope, shared=identity.shared)


@router.get("/policies", dependencies=[Depends(VIEWER)])
def list_policies() -> list[models.PolicyInfo]:
    """All registered presets."""
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
    """All nodes that ever registered, those that answer first."""
    with store_of(request).read() as connection:
        return nodes.listed(connection)


@router.post(
    "/nodes/{node}/session",
    responses=documented(_CONFLICT, _INVALID, _AWAY),
    dependencies=[Depends(allow("agent"))],
)
def create_node_session(request: Request, node: str) -> models.NodeSession:
    """Credentials of a node's agent; from now on nobody else can speak for this node."""
    only = identity_of(request).node
    if only is not None and only != node:
        message = f"this token is for the node {only}: make another for {node} with --node {node}"
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
    """Credentials of a run that its caller starts; from now on nobody else can speak for it."""
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
    """Records a run and, with `launch`, tells a node's agent or an engine to start it."""
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
    """What a simulated run simulates; null of another."""
    with store_of(request).read() as connection:
        return runs_store.scenario(connection, run)


@router.get(
    "/runs/{run}",
    response_model=models.RunInfo,
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def get_run(request: Request, response: Response, run: str) -> Any:
    """One run. Its `ETag` is for the `If-Match` of a change."""
    [row] = with_costs(request, [runs_store.get(store_of(request), run)])
    row["notice"] = row["notice"] or _unsuited(store_of(request), row)
    response.headers["ETag"] = etag(row["revision"])
    return row


def _unsuited(store: Store, run: Mapping[str, Any]) -> str | None:
    """Why the policy that a run began under plans nothing of it; None: it plans, or is unknown."""
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
    """Stops a run at its next segment; with `force`, or before it trains, its processes now."""
    body = body or models.Stop()
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why, body.operator)
    why = "stopped over the API"
    requests.stop(store, bus, run, why, by, force=body.force, expected=expected)
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
    """Lets a run that failed or was stopped go on, as a rule from its newest checkpoint.

    It may do so on another backend, and on other numbers of nodes and ranks.
    """
    body = body or models.Resume()
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why, body.operator)
    to = requests.Elsewhere(
        *(body.backend, body.backend_options, body.nodes_min, body.nodes_max, body.nproc),
        server=own_url(request),
    )
    asked = (body.env, body.max_restarts, by)
    requests.resume(store, bus, run, *asked, start=body.launch, to=to, expected=expected)
    return runs_store.get(store, run)


@router.get(
    "/runs/{run}/attempts",
    response_model=list[models.Attempt],
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_attempts(request: Request, run: str) -> Any:
    """Where each attempt began, and which steps it trains again."""
    with store_of(request).read() as connection:
        return attempts.starts(connection, runs_store.key_of(connection, run))
