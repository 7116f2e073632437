"""REST: training backends, and requests from nodes that an engine or a user has started.

A user can start nodes with `paceline node SCRIPT`. Each of these nodes requests its run by a key:
the request of the first node creates the run, and further nodes with this key get the same run.
Such a run is called adopted. A node that an engine starts joins the run for which it was started.
"""

from __future__ import annotations

import threading
import time
from http import HTTPStatus
from pathlib import PurePath
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from paceline_backend import backends, requests
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.models import In, Location, Name, NodeName, PolicyName, Text, bounded
from paceline_backend.api.preconditions import requester_of
from paceline_backend.api.rules import OPERATOR, VIEWER, allow
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.requests.adopting import Adoption
from paceline_backend.requests.enlisting import Enlisted
from paceline_backend.store.new_runs import NewRun

router = APIRouter()

# Minimum time between two queries to an engine, because clients may send `GET /backends` often.
_ENGINE_ANSWER_S = 5.0  # seconds


class BackendInfo(BaseModel):
    """A training backend."""

    name: str = Field(examples=["slurm"])
    engine: bool = Field(
        description="true: the backend is an engine, in whose queue runs wait", examples=[True]
    )
    options: dict[str, Any] = Field(
        description="JSON Schema of the `backend_options` of runs on the backend"
    )
    reachable: bool = Field(examples=[True])
    version: str | None = Field(
        description="version of the engine; null: unknown, or no engine", examples=["22.05.8"]
    )
    problem: str | None = Field(
        description="why the engine cannot be reached; null: no problem", examples=[None]
    )


class Adopt(In):
    """Request with which each node of an adopted run asks for its run."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"key": "slurm-4711.0", "script": "/home/me/train.py", "nproc": 4}]
        },
    )

    key: Name = Field(
        description="key that is equal on all nodes of the run, and different for other runs"
    )
    script: Location = Field(
        min_length=1, description="path of the script, absolute or relative to `cwd`"
    )
    args: Annotated[list[Text], AfterValidator(bounded)] = Field(default_factory=list)
    cwd: Location | None = None
    nproc: int = Field(ge=1, le=10_000, description="number of ranks on each node")
    nodes_min: int = Field(default=1, ge=1, le=1000, description="minimum number of nodes")
    nodes_max: int = Field(default=1, ge=1, le=1000, description="maximum number of nodes")
    policy: PolicyName = "paceline"
    parameters: dict[str, Any] = Field(default_factory=dict)
    name: Name | None = Field(
        default=None, description="name of the run; default: the script's name without its suffix"
    )
    max_restarts: int = Field(default=0, ge=0, le=1000)
    restart_hung_s: float | None = Field(
        default=None,
        ge=10,
        le=86_400,
        description="seconds for which the run must hang before all ranks are restarted; after "
        "`max_restarts` restarts, the run fails instead; null: never restarted",
    )


class _AvailabilityCache:
    """Cache of engines' availability, such as their versions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, backends.Availability]] = {}

    def of(self, engine: backends.Engine) -> backends.Availability:
        with self._lock:
            at, availability = self._known.get(engine.name, (0.0, backends.Availability(False)))
            if not at or time.monotonic() - at > _ENGINE_ANSWER_S:
                availability = engine.availability()
                self._known[engine.name] = (time.monotonic(), availability)
        return availability


_availability = _AvailabilityCache()


@router.get("/backends", dependencies=[Depends(VIEWER)])
def list_backends() -> list[BackendInfo]:
    """List the training backends, each with its run options and whether it is reachable."""
    return [_shown(backends.get(name)) for name in backends.names()]


def _shown(backend: backends.Backend) -> BackendInfo:
    engine = backends.engine(backend.name)
    availability = backends.Availability(True) if engine is None else _availability.of(engine)
    (schema,), components = msgspec.json.schema_components([backend.options])
    return BackendInfo(
        name=backend.name,
        engine=engine is not None,
        options=components.get(backend.options.__name__, schema),
        reachable=availability.reachable,
        version=availability.version,
        problem=availability.problem,
    )


@router.post(
    "/adoptions",
    responses=documented(
        *(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
        HTTPStatus.SERVICE_UNAVAILABLE,
    ),
    dependencies=[Depends(OPERATOR)],
)
def adopt_run(request: Request, body: Adopt) -> Adoption:
    """Return the run that has this key, and a token for its nodes.

    `paceline node SCRIPT` sends this request on each node. The first request creates the run.
    """
    who = identity_of(request)
    new = NewRun(
        name=body.name or PurePath(body.script).stem or body.script,
        **body.model_dump(exclude={"name", "key"}),
    )
    store, bus, by = store_of(request), settings_of(request).bus, requester_of(request)
    return requests.adopt(store, bus, body.key, new, by, whose=who.token or who.name)


@router.post(
    "/runs/{run}/nodes/{node}/join",
    responses={**RUN_REFUSALS, **documented(HTTPStatus.CONFLICT)},
    dependencies=[Depends(allow("agent"))],
)
def join_run(
    request: Request,
    run: str,
    node: str,
    host: Annotated[
        NodeName | None, Query(description="the engine's name for the node's machine")
    ] = None,
) -> Enlisted:
    """Launch a run on the node that sends this request, if the run needs the node.

    `paceline node` sends this request. The response says whether the run needs the node.
    """
    who = identity_of(request)
    if who.run not in (None, run) or who.node not in (None, node):
        only = f"the run {who.run}" if who.run else f"the node {who.node}"
        raise ProblemError(HTTPStatus.FORBIDDEN, f"this token is for {only} only")
    return requests.enlist(store_of(request), settings_of(request).bus, run, node, host or None)
