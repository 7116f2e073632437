"""REST: runs: list, start, stop, resume, and the credentials of a run's processes.

The fields of a run are `models.RunInfo`; `store.runs._described` fills them, and `with_costs` here
adds what depends on the server's prices. `Filter` selects runs by query parameters, here for the
list, in `history` for sums over runs.
Routes of other modules are about a run, too: `run_nodes` changes the nodes that it trains on,
`switching` its policy, `quality` its target, and `history` its tags and its note.
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

from paceline.wire import State
from paceline_backend import backends, policies, requests
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
from paceline_backend.api.queries import Moment, Page
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import bus_url, settings_of, store_of
from paceline_backend.insight import costs
from paceline_backend.policies.streams import problem_of
from paceline_backend.store import Store, attempts, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.history import FigureBounds, RunFilter
from paceline_backend.store.new_runs import NewRun

_MALFORMED = HTTPStatus.BAD_REQUEST
_CONFLICT = HTTPStatus.CONFLICT
_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
_AWAY = HTTPStatus.SERVICE_UNAVAILABLE

Part = Annotated[str | None, Query(max_length=200, description="substring")]
Exact = Annotated[str | None, Query(max_length=200, description="exact match")]
Figure = Annotated[
    float | None,
    Query(allow_inf_nan=False, description="limit for the mean over all complete steps of the run"),
]


class RunQuery(BaseModel):
    """Query parameters that select runs. A run must satisfy all conditions.

    `since` and `until` select by the time of creation, `active_since` and `active_until` by the
    time of training. The upper ends are excluded.
    """

    state: Annotated[list[State], Query(description="any of these states")] = []
    policy: Exact = None
    used: Annotated[
        str | None, Query(max_length=200, description="a policy that was in force at some time")
    ] = None
    parameter: Annotated[
        list[str],
        Query(
            max_length=20,
            description="parameter of the policy in force, as requested: `name=value`",
            examples=[["window=32"]],
        ),
    ] = []
    name: Part = None
    text: Annotated[
        str | None,
        Query(
            max_length=200,
            description="substring of name, script, note, policy, device, a tag or a node, or "
            "prefix of the id",
        ),
    ] = None
    node: Exact = None
    device: Part = None
    backend: Exact = None
    tag: Annotated[list[str], Query(max_length=20, description="all of these tags")] = []
    since: Moment = None
    until: Moment = None
    active_since: Moment = None
    active_until: Moment = None
    step_s_min: Figure = None
    step_s_max: Figure = None
    se_min: Figure = None
    se_max: Figure = None
    waste_min: Figure = None
    waste_max: Figure = None


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
    """Parse ``name=value`` pairs. A value that is not valid JSON is a string."""
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
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])


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
        min_length=1, description="path on the node; absolute, or relative to `cwd`"
    )
    args: Annotated[list[Text], AfterValidator(bounded)] = Field(default=[])
    nproc: int = Field(ge=1, le=100_000, description="ranks on each node")
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
        description="replace a node by a spare if verdicts report it as slow for long",
    )
    restart_hung_s: float | None = Field(
        default=None,
        ge=10,
        le=86_400,
        description="seconds of a hang after which all ranks restart, counted in `max_restarts`; "
        "if none is left, the run fails; null: never",
    )
    join_check: float = Field(
        default=1.5,
        ge=0,
        le=1000,
        description="with several nodes: how many times slower than the median a node may be to "
        "be chosen automatically; 1 or more; 0: no limit",
    )
    policy: PolicyName = "paceline"
    parameters: dict[str, Any] = Field(default={})
    name: Name | None = Field(default=None, description="default: the script's name")
    node: NodeName | None = Field(
        default=None, description="default: the least busy node that is alive"
    )
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = Field(default={})
    cwd: Location | None = None
    max_restarts: int = Field(default=0, ge=0, le=1000)
    launch: bool = Field(default=True, description="false: the caller starts the run itself")
    backend: Annotated[Text, StringConstraints(max_length=200)] = Field(
        default="local",
        description="name of a backend in `GET /backends`",
        json_schema_extra={"enum": list(backends.names())},
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(plain)] = Field(
        default={}, description="options of the backend; `GET /backends` has the schemas"
    )
    scenario: Annotated[dict[str, Any], AfterValidator(plain)] | None = Field(
        default=None, description="scenario of a simulated run; see docs/simulator.md"
    )


class Stop(ChangeRequest):
    """Request to stop a run."""

    force: bool = Field(
        default=False,
        description="true: end the processes now; false: at the next segment",
        examples=[False],
    )


class Resume(ChangeRequest):
    """Request to resume a run."""

    max_restarts: int | None = Field(
        default=None, ge=0, le=1000, description="default: as before", examples=[None]
    )
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = Field(
        default={},
        description="environment variables; their values are not stored: give all that the "
        "run needs",
    )
    launch: bool = Field(default=True, description="false: the caller starts the run itself")
    backend: Annotated[Text, StringConstraints(max_length=200)] | None = Field(
        default=None,
        description="backend on which the run continues; default: as before",
        examples=[None],
    )
    backend_options: Annotated[dict[str, Any], AfterValidator(plain)] | None = Field(
        default=None,
        description="options of the backend; default: as before, or the defaults of another "
        "backend",
        examples=[None],
    )
    nodes_min: int | None = Field(
        default=None, ge=1, le=1000, description="default: as before", examples=[None]
    )
    nodes_max: int | None = Field(
        default=None, ge=1, le=1000, description="default: as before", examples=[None]
    )
    nproc: int | None = Field(
        default=None, ge=1, le=100_000, description="default: as before", examples=[None]
    )


class Attempt(BaseModel):
    """Start of an attempt of a run."""

    attempt: int = Field(examples=[1])
    started_at: float = Field(examples=[1767225700.0])
    step: int = Field(description="first step of the attempt", examples=[40])
    reached: int = Field(
        description="one past the last step that earlier attempts had reported by then",
        examples=[47],
    )
    again: int = Field(
        description="number of steps that the attempt repeats: `step` … `reached` − 1"
    )


class RunSession(BaseModel):
    """Credentials of a run's processes for the bus. Secret."""

    bus: str = Field(
        description="URL of the bus with the run's own user",
        examples=["redis://user:password@host:6379/0"],
    )
    key: str = Field(description="key for MACs, in hexadecimal", examples=["c0ffee"])


router = APIRouter()
# `GET /runs`.
list_router = APIRouter()


def with_costs(request: Request, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of runs with the cost of each run."""
    price = settings_of(request).hour_price
    return [{**row, "cost": costs.of_run(row["figures"], row["backend"], price)} for row in rows]


def own_url(request: Request) -> str:
    """Return this server's URL for ranks: host as in the request, with a proxy's path prefix."""
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
        Sort, Query(description="with `-`: descending; unknown values come last")
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
    """Return credentials for a run that its caller starts; only their holder can act as the run."""
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
    """Return a run. Its `ETag` is for the `If-Match` of a change."""
    [row] = with_costs(request, [runs_store.get(store_of(request), run)])
    row["notice"] = row["notice"] or _unsuited(store_of(request), row)
    response.headers["ETag"] = etag(row["revision"])
    return row


def _unsuited(store: Store, run: Mapping[str, Any]) -> str | None:
    """Return why a run's policy cannot plan the run; None if it can, or if it is not installed."""
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
    """List the first step of each attempt, and the steps that the attempt repeats."""
    with store_of(request).read() as connection:
        return attempts.starts(connection, runs_store.key_of(connection, run))
