"""REST: nodes: their list, their agents' credentials, cordons, checks, and their history.

An agent asks for a session before it connects to the bus. An operator cordons a node, so that it
gets no new run, and has its machine measured again. An admin forgets a node that is gone.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from paceline.wire import State
from paceline_backend import requests
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.models import In, Name, Why
from paceline_backend.api.preconditions import QueryRequester, requester_of
from paceline_backend.api.rules import ADMIN, OPERATOR, VIEWER, allow
from paceline_backend.api.state import bus_url, settings_of, store_of
from paceline_backend.store import nodes
from paceline_backend.store.nodes import slowness

_REFUSALS = documented(
    HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE
)
_CHANGES = {**_REFUSALS, **documented(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)}

# Routes for the list of nodes and the agents' sessions.
agents_router = APIRouter()
# Routes for one node.
router = APIRouter(prefix="/nodes/{node}", responses=_REFUSALS)


class Cordoned(BaseModel):
    """Cordon of a node: who set it, when, and why."""

    by: str = Field(description="a token's name", examples=["ada"])
    at: float = Field(description="Unix time", examples=[1767225800.0])
    reason: str = Field(examples=["its disk is slow"])


class NodeSpeed(BaseModel):
    """Speed of a machine, measured by its agent while no rank trained there."""

    compute_gflops: float = Field(
        description="10⁹ operations per second of one core, while all cores are busy",
        examples=[48.0],
    )
    memory_gbps: float = Field(
        description="10⁹ bytes per second that one core copies", examples=[9.5]
    )
    disk_mbps: float | None = Field(
        description="10⁶ bytes per second written to the agent's data directory", examples=[410.0]
    )


class InEngine(BaseModel):
    """State of a cordon, or of its end, in the node's engine."""

    backend: str = Field(examples=["slurm"])
    host: str | None = Field(description="the engine's name for the machine", examples=["gpu7"])
    cordoned: bool = Field(
        description="state that the engine must have; false: the cordon is lifted", examples=[True]
    )
    told_at: float | None = Field(
        description="Unix time at which the engine was notified; null without `refusal`: pending",
        examples=[1767225801.0],
    )
    refusal: str | None = Field(description="error message of the engine", examples=[None])


class GpuInfo(BaseModel):
    """State of a GPU at the last heartbeat; null: the driver does not report the value."""

    sm_mhz: int | None = Field(description="clock of the streaming multiprocessors", examples=[780])
    most_sm_mhz: int | None = Field(description="maximum clock", examples=[1980])
    throttled_by: list[str] = Field(
        description="why the clock is lower; empty: not throttled", examples=[["heat"]]
    )
    temperature_c: int | None = Field(examples=[87])
    power_w: float | None = Field(examples=[212.5])
    ecc_errors: int | None = Field(
        description="uncorrected memory errors since the driver was loaded", examples=[0]
    )


class NodeInfo(BaseModel):
    """A machine with an agent."""

    id: str = Field(examples=["node-1"])
    hostname: str = Field(examples=["node-1.example.org"])
    cores: int = Field(examples=[16])
    memory_bytes: int = Field(examples=[68719476736])
    gpus: list[str] = Field(examples=[[]])
    paceline: str = Field(description="Paceline version of the agent", examples=["0.1.0"])
    registered_at: float = Field(examples=[1767225600.0])
    heartbeat_at: float = Field(description="Unix time", examples=[1767225660.0])
    alive: bool = Field(description="the agent sent a heartbeat in the last 7 s", examples=[True])
    runs: list[str] = Field(examples=[["3f9a1c07be52"]])
    cordoned: Cordoned | None = Field(description="null: not cordoned")
    spare_of: str | None = Field(
        description="run for which the node is reserved as a spare", examples=[None]
    )
    check: NodeSpeed | None = Field(description="null: not measured yet")
    checked_at: float | None = Field(
        description="Unix time, by the node's clock", examples=[1767225602.0]
    )
    gpu_states: list[GpuInfo] | None = Field(
        description="state of each GPU, in the driver's order; null: unknown"
    )
    revoked: bool = Field(
        description="the token that admitted the node was revoked or has expired", examples=[False]
    )
    only_run: str | None = Field(
        description="only run that this agent serves, because an engine started it; null: any run",
        examples=[None],
    )
    host: str | None = Field(
        description="the engine's name for the machine; null: no engine, or unknown",
        examples=[None],
    )
    in_engine: InEngine | None = Field(
        description="null: no cordon, or end of a cordon, to report to an engine"
    )


class NodeSession(BaseModel):
    """Credentials of a node's agent for the bus. Secret."""

    id: str = Field(description="id of this control plane", examples=["3f9a1c07be52d4e6"])
    bus: str = Field(
        description="URL of the bus with the node's own user",
        examples=["redis://user:password@host:6379/0"],
    )
    key: str = Field(description="key for MACs and seals, in hexadecimal", examples=["c0ffee"])


class NewCordon(In):
    """Request to cordon a node."""

    reason: Why = Field(default="", examples=["its disk is slow"])
    by: Name = Field(
        default="api", description="client program, for the audit log", examples=["api"]
    )


class NodeRun(BaseModel):
    """A run that a node took part in."""

    run: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    state: State = Field(description="state of the run on this node", examples=["running"])
    launched_at: float = Field(examples=[1767225600.0])
    message: str | None = Field(description="why the run failed there", examples=[None])
    asked_to_leave: bool = Field(examples=[False])
    replaces: str | None = Field(description="node that this node replaced", examples=[None])


class NodeVerdict(BaseModel):
    """A verdict that named a node slow."""

    run: str = Field(examples=["3f9a1c07be52"])
    at: float = Field(description="Unix time", examples=[1767225700.0])
    ended_at: float | None = Field(
        description="null: verdicts still name the node", examples=[None]
    )
    attempt: int = Field(examples=[0])
    step: int = Field(description="newest step when the node was first named", examples=[120])
    factor: float | None = Field(
        description="time of the node's slow ranks ÷ time of the other nodes, at equal load",
        examples=[3.0],
    )
    words: str = Field(examples=["n2 computes at a third of the others' pace."])


class PastCordon(BaseModel):
    """A cordon of a node, lifted or still active."""

    at: float = Field(description="Unix time", examples=[1767225800.0])
    by: str = Field(description="a token's name", examples=["ada"])
    reason: str = Field(examples=["its disk is slow"])
    lifted_at: float | None = Field(description="null: still cordoned", examples=[None])
    lifted_by: str | None = Field(examples=[None])
    lifted_why: str | None = Field(examples=[None])


class NodeHistory(BaseModel):
    """History of a node."""

    node: str = Field(examples=["n2"])
    runs: list[NodeRun]
    slow: list[NodeVerdict]
    cordons: list[PastCordon]


@agents_router.get(
    "/nodes",
    response_model=list[NodeInfo],
    responses=documented(HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(VIEWER)],
)
def list_nodes(request: Request) -> Any:
    """List all nodes that ever registered. Nodes whose agent answers come first."""
    with store_of(request).read() as connection:
        return nodes.listed(connection)


@agents_router.post(
    "/nodes/{node}/session",
    responses=documented(
        *(HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE)
    ),
    dependencies=[Depends(allow("agent"))],
)
def create_node_session(request: Request, node: str) -> NodeSession:
    """Return credentials for a node's agent; only their holder can act as the node from then on."""
    only = identity_of(request).node
    if only is not None and only != node:
        message = f"this token is for the node {only}: create another for {node} with --node {node}"
        raise ProblemError(HTTPStatus.FORBIDDEN, message)
    who, store = identity_of(request), store_of(request)
    token = who.token or None
    made = requests.sessions.of_node(store, settings_of(request).bus, node, token, who.run)
    bus = bus_url(request, made.bus)
    return NodeSession(id=request.app.state.control_id, bus=bus, key=made.key.hex())


@router.put(
    "/cordon", response_model=NodeInfo, responses=_CHANGES, dependencies=[Depends(OPERATOR)]
)
def cordon_node(request: Request, node: str, body: NewCordon) -> Any:
    """Cordon a node: it gets no new run and joins none, even if a request names it.

    Runs on the node continue. A node of an engine is cordoned in the engine, too; `in_engine` shows
    whether that is done. The request needs no `If-Match`: 409 reports that the node is already
    cordoned.
    """
    by = requester_of(request, body.by, body.reason)
    requests.cordon(store_of(request), node, by)
    return _node(request, node)


@router.delete(
    "/cordon", response_model=NodeInfo, responses=_CHANGES, dependencies=[Depends(OPERATOR)]
)
def uncordon_node(request: Request, node: str, by: QueryRequester) -> Any:
    """Lift the cordon of a node. 409: the node is not cordoned."""
    requests.uncordon(store_of(request), node, by)
    return _node(request, node)


@router.delete("", response_model=NodeInfo, responses=_CHANGES, dependencies=[Depends(ADMIN)])
def forget_node(request: Request, node: str, by: QueryRequester) -> Any:
    """Delete a node from the list, and revoke its key and its user of the bus.

    Its cordons and its part in runs are kept. 409: its agent answers, or a run uses the node.
    """
    bus = settings_of(request).bus
    return requests.sessions.forget(store_of(request), bus, node, by)


@router.post(
    "/check",
    status_code=HTTPStatus.ACCEPTED,
    response_model=NodeInfo,
    responses=_CHANGES,
    dependencies=[Depends(OPERATOR)],
)
def check_node(request: Request, node: str, by: QueryRequester) -> Any:
    """Ask a node's agent to measure the machine again.

    The result arrives in a few seconds and changes `checked_at`. 409: the agent does not answer, or
    ranks train on the node.
    """
    bus = settings_of(request).bus
    requests.check_node(store_of(request), bus, node, by)
    return _node(request, node)


@router.get("/history", response_model=NodeHistory, dependencies=[Depends(VIEWER)])
def get_history(
    request: Request, node: str, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> Any:
    """Return a node's runs, the verdicts that named it slow, and its cordons; newest first."""
    with store_of(request).read() as connection:
        return slowness.history(connection, node, limit)


def _node(request: Request, node: str) -> dict[str, Any]:
    with store_of(request).read() as connection:
        return nodes.known(connection, node)
