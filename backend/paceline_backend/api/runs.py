"""REST: the server, its nodes and policies, runs and what may be done to them."""

from __future__ import annotations

import dataclasses
import logging
from http import HTTPStatus
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from paceline.core.version import __version__
from paceline.wire import PROTOCOL_VERSION
from paceline.wire.bus import at_host, without_password
from paceline_backend import policies, requests
from paceline_backend.api import models
from paceline_backend.api.audit import CHANGE_REFUSALS, Expected, etag, requester_of
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.rules import OPERATOR, VIEWER, allow
from paceline_backend.insight import effects
from paceline_backend.insight.whatif import cautions
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, StoreError, attempts, nodes, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.new_runs import NewRun

router = APIRouter()
logger = logging.getLogger(__name__)

_MALFORMED = HTTPStatus.BAD_REQUEST
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
    response_model=list[models.Node],
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
    run = identity_of(request).run
    made = requests.sessions.of_node(store_of(request), settings_of(request).bus, node, run)
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
    response_model=models.Run,
    responses=documented(_MALFORMED, _CONFLICT, _INVALID, _AWAY),
    dependencies=[Depends(OPERATOR)],
)
def create_run(request: Request, body: models.RunCreate) -> Any:
    """Records a run and, with `launch`, tells a node's agent or an engine to start it."""
    store = store_of(request)
    new = NewRun(
        name=body.name or PurePath(body.script).stem or body.script,
        **body.model_dump(exclude={"name", "launch"}),
        server=str(request.base_url).rstrip("/"),
    )
    by = requester_of(request)
    run = requests.launch(store, settings_of(request).bus, new, by, start=body.launch)
    return runs_store.get(store, run)


@router.get(
    "/runs",
    response_model=models.RunPage,
    responses=documented(_INVALID, _AWAY),
    dependencies=[Depends(VIEWER)],
)
def list_runs(
    request: Request,
    state: Annotated[list[models.State], Query(description="any of these")] = [],  # noqa: B006
    policy: Annotated[str | None, Query(max_length=200, description="exactly")] = None,
    name: Annotated[str | None, Query(max_length=200, description="a part of it")] = None,
    since: Annotated[float | None, Query(description="created at this Unix time or later")] = None,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[
        str | None, Query(max_length=100, description="`next_cursor` of the page before")
    ] = None,
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


@router.get("/runs/{run}/scenario", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])
def get_scenario(request: Request, run: str) -> dict[str, Any] | None:
    """What a simulated run simulates; null of another."""
    with store_of(request).read() as connection:
        return runs_store.scenario(connection, run)


@router.get(
    "/runs/{run}", response_model=models.Run, responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)]
)
def get_run(request: Request, response: Response, run: str) -> Any:
    """One run. Its `ETag` is for the `If-Match` of a change."""
    row = runs_store.get(store_of(request), run)
    response.headers["ETag"] = etag(row["revision"])
    return row


@router.post(
    "/runs/{run}/stop",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.Run,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def stop_run(
    request: Request, run: str, expected: Expected, body: models.Stop | None = None
) -> Any:
    """Stops a run at its next segment; with `force`, or before it trains, its processes now."""
    body = body or models.Stop()
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why)
    why = "stopped over the API"
    requests.stop(store, bus, run, why, by, force=body.force, expected=expected)
    return runs_store.get(store, run)


@router.post(
    "/runs/{run}/resume",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.Run,
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
    by = requester_of(request, body.by, body.why)
    to = requests.Elsewhere(
        *(body.backend, body.backend_options, body.nodes_min, body.nodes_max, body.nproc),
        server=str(request.base_url).rstrip("/"),
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


@router.post(
    "/runs/{run}/policy",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.Switch,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def switch_policy(request: Request, run: str, expected: Expected, body: models.PolicySwitch) -> Any:
    """Requests another policy; it plans from the next segment on."""
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why)
    return requests.switch(store, bus, run, body.policy, body.parameters, by, expected=expected)


@router.get(
    "/runs/{run}/policy/warnings",
    responses={**RUN_REFUSALS, **documented(_INVALID)},
    dependencies=[Depends(VIEWER)],
)
def switch_warnings(
    request: Request,
    run: str,
    policy: Annotated[str, Query(max_length=200, description="name of a preset")],
    parameters: Annotated[
        str, Query(max_length=4_000, description="of the preset, as a JSON object")
    ] = "{}",
) -> models.SwitchWarnings:
    """What to know before a switch to this policy. The first answer may take seconds."""
    try:
        given = msgspec.json.decode(parameters, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        message = f"give a JSON object: {error}"
        raise requests.InvalidRequestError("parameters", message) from error
    store = store_of(request)
    known = runs_store.get(store, run)
    requests.check_policy(policy, given, known["world"] or known["nproc"] * known["nodes_max"])
    try:
        return models.SwitchWarnings(warnings=cautions.of_run(store, run, policy, given))
    except StoreError:
        raise
    except Exception:  # a third party's preset, or records that no model fits
        logger.warning("run %s: no warnings of %s", run, policy, exc_info=True)
        return models.SwitchWarnings(warnings=[])


@router.get(
    "/runs/{run}/effects",
    response_model=list[models.Effect],
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_effects(request: Request, run: str) -> Any:
    """What each switch that has taken effect changed, oldest first."""
    with store_of(request).read() as connection:
        made = effects.of_run(connection, run)
    return [{**dataclasses.asdict(effect), "words": effect.words} for effect in made]


@router.get(
    "/runs/{run}/switches",
    response_model=list[models.Switch],
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_switches(request: Request, run: str) -> Any:
    """Every policy that was asked for, and since when it plans."""
    return switches.rows(store_of(request), run)
