"""REST: the server, its nodes and policies, runs and what may be done to them."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import PurePath
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from paceline.core.version import __version__
from paceline.wire import (
    PROTOCOL_VERSION,
)
from paceline_backend import policies, requests
from paceline_backend.api import models
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, nodes, switches
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


def settings_of(request: Request) -> Settings:
    """The application's settings."""
    settings: Settings = request.app.state.settings
    return settings


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


@router.get("/nodes", response_model=list[models.Node], responses=documented(_AWAY))
def list_nodes(request: Request) -> Any:
    """All nodes that ever registered, those that answer first."""
    with store_of(request).read() as connection:
        return nodes.listed(connection)


@router.post(
    "/runs",
    status_code=HTTPStatus.CREATED,
    response_model=models.Run,
    responses=documented(_MALFORMED, _CONFLICT, _INVALID, _AWAY),
)
def create_run(request: Request, body: models.RunCreate) -> Any:
    """Records a run and, with `launch`, tells a node's agent to start it."""
    store = store_of(request)
    new = NewRun(
        name=body.name or PurePath(body.script).stem or body.script,
        **body.model_dump(exclude={"name", "launch"}),
    )
    run = requests.launch(store, settings_of(request).bus, new, "api", start=body.launch)
    return runs_store.get(store, run)


@router.get("/runs", response_model=models.RunPage, responses=documented(_INVALID, _AWAY))
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


@router.get("/runs/{run}/scenario", responses=RUN_REFUSALS)
def get_scenario(request: Request, run: str) -> dict[str, Any] | None:
    """What a simulated run simulates; null of another."""
    with store_of(request).read() as connection:
        return runs_store.scenario(connection, run)


@router.get("/runs/{run}", response_model=models.Run, responses=RUN_REFUSALS)
def get_run(request: Request, run: str) -> Any:
    """One run."""
    return runs_store.get(store_of(request), run)


@router.post(
    "/runs/{run}/stop",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.Run,
    responses={**RUN_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
)
def stop_run(request: Request, run: str, body: models.Stop | None = None) -> Any:
    """Stops a run at its next segment; with `force`, or before it trains, its processes now."""
    force = body is not None and body.force
    store = store_of(request)
    requests.stop(store, settings_of(request).bus, run, "stopped over the API", force=force)
    return runs_store.get(store, run)


@router.post(
    "/runs/{run}/policy",
    status_code=HTTPStatus.ACCEPTED,
    response_model=models.Switch,
    responses={**RUN_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
)
def switch_policy(request: Request, run: str, body: models.PolicySwitch) -> Any:
    """Requests another policy; it plans from the next segment on."""
    bus = settings_of(request).bus
    return requests.switch(store_of(request), bus, run, body.policy, body.parameters, body.by)


@router.get(
    "/runs/{run}/switches",
    response_model=list[models.Switch],
    responses=RUN_REFUSALS,
)
def list_switches(request: Request, run: str) -> Any:
    """Every policy that was asked for, and since when it plans."""
    return switches.rows(store_of(request), run)
