"""REST: runs: list, start, stop, resume, and the credentials of a run's processes.

`models.RunInfo` defines the fields of a run. `store.runs._described` fills them, except for the
cost, which `with_costs` adds. `Filter` selects runs by query parameters: for the list of runs here,
and for sums over runs in `history`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import PurePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from paceline import policies
from paceline.policies.streams import problem_of
from paceline.wire import State
from paceline_backend import backends, requests
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.models import (
    ChangeRequest,
    In,
    Location,
    Name,
    NodeName,
    PolicyName,
    RunInfo,
    Text,
    Variable,
    bounded,
    bounded_variables,
    plain,
)
from paceline_backend.api.preconditions import CHANGE_REFUSALS, Expected, etag, requester_of
from paceline_backend.api.queries import Page, moment
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import bus_url, settings_of, store_of
from paceline_backend.insight import costs
from paceline_backend.store import Store, attempts, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.history import FigureBounds, RunFilter
from paceline_backend.store.new_runs import NewRun

_MALFORMED = HTTPStatus.BAD_REQUEST
_CONFLICT = HTTPStatus.CONFLICT
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_AWAY = HTTPStatus.SERVICE_UNAVAILABLE


def _text(description: str) -> Any:
    return Query(max_length=200, description=description)


def _mean(metric: str, bound: str) -> Any:
    description = f"runs whose mean {metric}, over all complete steps, is {bound} this value"
    return Query(allow_inf_nan=False, description=description)


class RunQuery(BaseModel):
    """Query parameters that select runs. A run must satisfy all conditions."""

    state: Annotated[
        list[State], Query(description="runs that are in one of the given states")
    ] = []
    policy: Annotated[str | None, _text("runs whose last requested policy has this name")] = None
    used: Annotated[
        str | None, _text("runs whose policy had this name at some time, in force or requested")
    ] = None
    parameter: Annotated[
        list[str],
        Query(
            max_length=20,
            description="runs whose last requested policy has all the given parameters, each as "
            "`name=value`",
            examples=[["window=32"]],
        ),
    ] = []
    name: Annotated[str | None, _text("runs whose name contains this text")] = None
    text: Annotated[
        str | None,
        _text(
            "runs that contain this text in name, script, note, policy, device, a tag or a node, "
            "or whose id begins with it"
        ),
    ] = None
    node: Annotated[str | None, _text("runs that train or trained on this node")] = None
    device: Annotated[str | None, _text("runs whose device name contains this text")] = None
    backend: Annotated[str | None, _text("runs on this backend")] = None
    tag: Annotated[
        list[str], Query(max_length=20, description="runs that have all of the given tags")
    ] = []
    since: Annotated[float | None, moment("runs created at this Unix time or later")] = None
    until: Annotated[float | None, moment("runs created before this Unix time")] = None
    active_since: Annotated[
        float | None, moment("runs that trained at this Unix time or later")
    ] = None
    active_until: Annotated[float | None, moment("runs that trained before this Unix time")] = None
    step_s_min: Annotated[float | None, _mean("step time in seconds", "at least")] = None
    step_s_max: Annotated[float | None, _mean("step time in seconds", "at most")] = None
    se_min: Annotated[float | None, _mean("straggler effect (SE)", "at least")] = None
    se_max: Annotated[float | None, _mean("straggler effect (SE)", "at most")] = None
    waste_min: Annotated[float | None, _mean("straggler waste", "at least")] = None
    waste_max: Annotated[float | None, _mean("straggler waste", "at most")] = None


def _filter(query: Annotated[RunQuery, Query()]) -> RunFilter:
    return RunFilter(
        states=query.state,
        policy=query.policy,
        used=query.used,
        parameters=_parameters(query.parameter),
        name=query.name,
        text=query.text,
        node=query.node,
        device=query.device,
        backend=query.backend,
        tags=query.tag,
        since=query.since,
        until=query.until,
        active_since=query.active_since,
        active_until=query.active_until,
        step_s=FigureBounds(query.step_s_min, query.step_s_max),
        se=FigureBounds(query.se_min, query.se_max),
        waste=FigureBounds(query.waste_min, query.waste_max),
    )


Filter = Annotated[RunFilter, Depends(_filter)]


def _parameters(pairs: Sequence[str]) -> dict[str, Any]:
    parameters = {}
    for pair in pairs:
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]{0,99})=(.{0,200})", pair)
        if match is None or "\0" in pair:
            message = "give name=value, such as window=32"
            raise requests.InvalidRequestError("parameter", message)
        parameters[match[1]] = _value(match[2])
    return parameters


def _value(text: str) -> str | bool | float:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, bool | str):
        return value
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        number = math.nan
    return number if math.isfinite(number) else text


class RunPage(BaseModel):
    """Runs in the requested order."""

    items: list[RunInfo]
    next_cursor: str | None = Field(
        description="`cursor` for the next page; null: this is the last page", examples=["MTIz"]
    )


Sort = Literal[
    "created_at",
    "started_at",
    "ended_at",
    "name",
    "policy",
    "state",
    "steps",
    "step_s",
    "se",
    "waste",
    "cost",
    "waited_cost",
    "-created_at",
    "-started_at",
    "-ended_at",
    "-name",
    "-policy",
    "-state",
    "-steps",
    "-step_s",
    "-se",
    "-waste",
    "-cost",
    "-waited_cost",
]


class RunCreate(In):
    """Request to start a run."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "script": "/home/me/train.py",
                    "args": ["--epochs", "3"],
                    "nproc": 4,
                    "policy": "chronica",
                }
            ]
        },
    )

    script: Location = Field(
        min_length=1,
        description="path of the script on the node, absolute or relative to `cwd`",
    )
    args: Annotated[list[Text], AfterValidator(bounded)] = Field(default=[])
    nproc: int = Field(ge=1, le=100_000, description="number of ranks on each node")
    nodes_min: int = Field(
        default=1, ge=1, le=1000, description="minimum number of nodes; at most `nodes_max`"
    )
    nodes_max: int = Field(
        default=1,
        ge=1,
        le=1000,
        description="maximum number of nodes; above 1: the run trains on several nodes",
    )
    spares: int = Field(
        default=0, ge=0, le=1000, description="number of idle nodes to reserve while the run trains"
    )
    replace_slow_nodes: bool = Field(
        default=False,
        description="true: a spare replaces a node that verdicts report as slow for long",
    )
    restart_hung_s: float | None = Field(
        default=None,
        ge=10,
        le=86_400,
        description="seconds for which the run must hang before all ranks are restarted; after "
        "`max_restarts` restarts, the run fails instead; null: never restarted",
    )
    join_check: float = Field(
        default=1.5,
        ge=0,
        le=1000,
        description="maximum slowness of a node that is chosen automatically for a run on several "
        "nodes: 1.5 allows nodes up to 1.5 times slower than the median node; 0: no limit; other "
        "values must be at least 1",
    )
    policy: PolicyName = "paceline"
    parameters: dict[str, Any] = Field(default={})
    name: Name | None = Field(
        default=None, description="name of the run; default: the script's name without its suffix"
    )
    node: NodeName | None = Field(
        default=None,
        description="node that starts the run; default: the least busy node whose agent answers",
    )
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = Field(default={})
    cwd: Location | None = None
    max_restarts: int = Field(default=0, ge=0, le=1000)
    launch: bool = Field(
        default=True, description="false: the caller starts the run's processes itself"
    )
    backend: Annotated[Text, StringConstraints(max_length=200)] = Field(
        default="local",
        description="name of a backend in `GET /backends`",
        json_schema_extra={"enum": list(backends.names())},
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(plain)] = Field(
        default={}, description="options of the backend; `GET /backends` has their JSON Schema"
    )
    scenario: Annotated[dict[str, Any], AfterValidator(plain)] | None = Field(
        default=None, description="scenario of a simulated run; see docs/simulator.md"
    )


class Stop(ChangeRequest):
    """Request to stop a run."""

    force: bool = Field(
        default=False,
        description="true: end the run's processes now; false: stop the run at its next segment",
        examples=[False],
    )


class Resume(ChangeRequest):
    """Request to resume a run."""

    max_restarts: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="maximum number of restarts from now on; default: unchanged",
        examples=[None],
    )
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = Field(
        default={},
        description="values of the environment variables that the run was created with, which the "
        "server does not store",
    )
    launch: bool = Field(
        default=True, description="false: the caller starts the run's processes itself"
    )
    backend: Annotated[Text, StringConstraints(max_length=200)] | None = Field(
        default=None,
        description="backend on which the run continues; default: unchanged",
        examples=[None],
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(plain)] | None = Field(
        default=None,
        description="options of the backend; default: unchanged, or if `backend` changes, the "
        "default options of the new backend",
        examples=[None],
    )
    nodes_min: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="minimum number of nodes; default: unchanged",
        examples=[None],
    )
    nodes_max: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="maximum number of nodes; default: unchanged",
        examples=[None],
    )
    nproc: int | None = Field(
        default=None,
        ge=1,
        le=100_000,
        description="number of ranks on each node; default: unchanged",
        examples=[None],
    )


class Attempt(BaseModel):
    """Start of an attempt of a run."""

    attempt: int = Field(examples=[1])
    started_at: float = Field(examples=[1767225700.0])
    step: int = Field(description="first step of the attempt", examples=[40])
    reached: int = Field(
        description="last step that earlier attempts had reported when the attempt started, plus 1",
        examples=[47],
    )
    again: int = Field(
        description="number of steps that the attempt repeats: from `step` to `reached` − 1"
    )


class RunSession(BaseModel):
    """Secret credentials with which a run's processes use the bus."""

    bus: str = Field(
        description="URL of the bus, with the run's own user and password",
        examples=["redis://user:password@host:6379/0"],
    )
    key: str = Field(
        description="key for the MACs (signatures) of messages, in hexadecimal", examples=["c0ffee"]
    )


router = APIRouter()
list_router = APIRouter()


def with_costs(request: Request, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of runs with the cost of each run."""
    price = settings_of(request).hour_price
    return [{**row, "cost": costs.of_run(row["figures"], row["backend"], price)} for row in rows]


def own_url(request: Request) -> str:
    """Return the URL at which ranks reach this server: the request's host and the path prefix."""
    return str(request.base_url).rstrip("/") + settings_of(request).path_prefix


@list_router.get(
    "/runs",
    response_model=RunPage,
    responses=documented(_INVALID, _AWAY),
    dependencies=[Depends(VIEWER)],
)
def list_runs(
    request: Request,
    which: Filter,
    sort: Annotated[
        Sort,
        Query(
            description="field to sort by, with `-` in front in descending order; runs without a "
            "value come last"
        ),
    ] = "-created_at",
    *,
    page: Page,
) -> Any:
    """List runs, newest first unless `sort` gives another order."""
    items, following = runs_store.page(
        store_of(request), which, sort=sort, limit=page.limit, cursor=page.cursor
    )
    return {"items": with_costs(request, items), "next_cursor": following}


@router.post(
    "/runs/{run}/session",
    responses={**RUN_REFUSALS, **documented(_CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def create_run_session(request: Request, run: str) -> RunSession:
    """Return the credentials of a run whose processes the caller starts.

    Only processes with these credentials can send messages in the name of the run.
    """
    made = requests.sessions.of_run(store_of(request), settings_of(request).bus, run)
    return RunSession(bus=bus_url(request, made.bus), key=made.key.hex())


@router.post(
    "/runs",
    status_code=HTTPStatus.CREATED,
    response_model=RunInfo,
    responses=documented(_MALFORMED, _CONFLICT, _INVALID, _AWAY),
    dependencies=[Depends(OPERATOR)],
)
def create_run(request: Request, body: RunCreate) -> Any:
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
    response_model=RunInfo,
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def get_run(request: Request, response: Response, run: str) -> Any:
    """Return a run. A request to change the run sends the response's `ETag` as `If-Match`."""
    [row] = with_costs(request, [runs_store.get(store_of(request), run)])
    row["notice"] = row["notice"] or _unsuited(store_of(request), row)
    response.headers["ETag"] = etag(row["revision"])
    return row


def _unsuited(store: Store, run: Mapping[str, Any]) -> str | None:
    """Return why a run's policy cannot plan the run; None if the policy can.

    The result is also None if this server cannot make the policy, for example because the package
    of the policy is not installed.
    """
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
    response_model=RunInfo,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def stop_run(request: Request, run: str, expected: Expected, body: Stop | None = None) -> Any:
    """Stop a run at its next segment.

    With `force`, or if the run does not train yet, end its processes now.
    """
    body = body or Stop()
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why, body.operator)
    why = "stopped over the API"
    requests.stop(store, bus, RequestedChange(run, by, expected), why, force=body.force)
    return runs_store.get(store, run)


@router.post(
    "/runs/{run}/resume",
    status_code=HTTPStatus.ACCEPTED,
    response_model=RunInfo,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(_MALFORMED, _CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def resume_run(request: Request, run: str, expected: Expected, body: Resume | None = None) -> Any:
    """Resume a run that failed or was stopped, usually from its newest checkpoint.

    The run may continue on another backend, and with other numbers of nodes and ranks.
    """
    body = body or Resume()
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
    response_model=list[Attempt],
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_attempts(request: Request, run: str) -> Any:
    """List the attempts, each with its first step and the number of steps that it repeats."""
    with store_of(request).read() as connection:
        return attempts.starts(connection, runs_store.key_of(connection, run))
