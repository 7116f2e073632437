"""REST: list of nodes, credentials of their agents, cordons, speed measurements, and history.

An agent requests a session (its credentials) before it connects to the bus. An operator can cordon
a node, so that it gets no new run, and can request a new measurement of the machine's speed. An
admin can delete a node whose agent no longer answers.
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

agents_router = APIRouter()
router = APIRouter(prefix="/nodes/{node}", responses=_REFUSALS)


class Cordoned(BaseModel):
    """Cordon of a node: who set it, when, and why."""

    by: str = Field(
        description="name of the token whose holder cordoned the node", examples=["ada"]
    )
    at: float = Field(
        description="Unix time at which the node was cordoned", examples=[1767225800.0]
    )
    reason: str = Field(examples=["its disk is slow"])


class NodeSpeed(BaseModel):
    """Speed of a machine, measured by its agent while no rank trained there."""

    compute_gflops: float = Field(
        description="speed of one core while all cores are busy, in 10⁹ operations per second",
        examples=[48.0],
    )
    memory_gbps: float = Field(
        description="speed at which one core copies memory, in 10⁹ bytes per second",
        examples=[9.5],
    )
    disk_mbps: float | None = Field(
        description="speed of writing to the agent's data directory, in 10⁶ bytes per second; "
        "null: unknown",
        examples=[410.0],
    )


class InEngine(BaseModel):
    """State of a node's cordon in the node's engine, which gets each change of the cordon."""

    backend: str = Field(examples=["slurm"])
    host: str | None = Field(
        description="the engine's name for the machine; null: unknown", examples=["gpu7"]
    )
    cordoned: bool = Field(
        description="true: the engine should cordon the machine; false: the engine should lift the "
        "cordon",
        examples=[True],
    )
    told_at: float | None = Field(
        description="Unix time at which the engine accepted the change; null: it refused (see "
        "`refusal`), or has not answered yet",
        examples=[1767225801.0],
    )
    refusal: str | None = Field(
        description="why the engine did not accept the change; null: it did not refuse",
        examples=[None],
    )


class GpuInfo(BaseModel):
    """State of a GPU at the node's last heartbeat; null: the driver does not report the value."""

    sm_mhz: int | None = Field(
        description="clock of the streaming multiprocessors in MHz; null: unknown", examples=[780]
    )
    most_sm_mhz: int | None = Field(
        description="maximum clock of the streaming multiprocessors in MHz; null: unknown",
        examples=[1980],
    )
    throttled_by: list[str] = Field(
        description="reasons why the driver reduces the GPU's clock; empty: not throttled",
        examples=[["heat"]],
    )
    temperature_c: int | None = Field(examples=[87])
    power_w: float | None = Field(examples=[212.5])
    ecc_errors: int | None = Field(
        description="uncorrected memory errors since the driver was loaded; null: unknown",
        examples=[0],
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
    heartbeat_at: float = Field(
        description="Unix time of the agent's last heartbeat", examples=[1767225660.0]
    )
    alive: bool = Field(
        description="true: the agent sent a heartbeat in the last 7 s, and its token is valid",
        examples=[True],
    )
    runs: list[str] = Field(examples=[["3f9a1c07be52"]])
    cordoned: Cordoned | None = Field(description="cordon of the node; null: not cordoned")
    spare_of: str | None = Field(
        description="run for which the node is reserved as a spare; null: none", examples=[None]
    )
    check: NodeSpeed | None = Field(
        description="measured speed of the machine; null: not measured yet"
    )
    checked_at: float | None = Field(
        description="Unix time at which the speed of the machine was measured, by the node's "
        "clock; null: not measured yet",
        examples=[1767225602.0],
    )
    gpu_states: list[GpuInfo] | None = Field(
        description="state of each GPU, in the driver's order; null: unknown"
    )
    revoked: bool = Field(
        description="true: the token that admitted the node was revoked or has expired",
        examples=[False],
    )
    only_run: str | None = Field(
        description="only run that the agent serves, because its token belongs to this run; null: "
        "any run",
        examples=[None],
    )
    host: str | None = Field(
        description="the engine's name for the machine; null: no engine, or unknown",
        examples=[None],
    )
    in_engine: InEngine | None = Field(
        description="state of the node's cordon in its engine; null: no engine, or the engine has "
        "no cordon to set or to lift"
    )


class NodeSession(BaseModel):
    """Secret credentials with which a node's agent uses the bus."""

    id: str = Field(description="permanent id of the control plane", examples=["3f9a1c07be52d4e6"])
    bus: str = Field(
        description="URL of the bus, with the node's own user and password",
        examples=["redis://user:password@host:6379/0"],
    )
    key: str = Field(
        description="key for the MACs (signatures) and the encryption of messages, in hexadecimal",
        examples=["c0ffee"],
    )


class NewCordon(In):
    """Request to cordon a node."""

    reason: Why = Field(default="", examples=["its disk is slow"])
    by: Name = Field(
        default="api",
        description="name of the client program, for the audit log",
        examples=["api"],
    )


class NodeRun(BaseModel):
    """A run that a node took part in."""

    run: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    state: State = Field(description="state of the run on this node", examples=["running"])
    launched_at: float = Field(examples=[1767225600.0])
    message: str | None = Field(
        description="why the run failed on this node; null: it did not fail", examples=[None]
    )
    asked_to_leave: bool = Field(examples=[False])
    replaces: str | None = Field(
        description="node that this node replaced in the run; null: none", examples=[None]
    )


class NodeVerdict(BaseModel):
    """Period in which verdicts about a run named a node as slow."""

    run: str = Field(examples=["3f9a1c07be52"])
    at: float = Field(
        description="Unix time at which a run's verdict first named the node as slow",
        examples=[1767225700.0],
    )
    ended_at: float | None = Field(
        description="Unix time from which verdicts no longer named the node; null: they still do",
        examples=[None],
    )
    attempt: int = Field(examples=[0])
    step: int = Field(
        description="newest step of the run when a verdict first named the node", examples=[120]
    )
    factor: float | None = Field(
        description="time of the node's slow ranks ÷ time of the ranks on other nodes, at equal "
        "load; null: unknown",
        examples=[3.0],
    )
    words: str = Field(examples=["n2 computes at a third of the others' pace."])


class PastCordon(BaseModel):
    """A cordon of a node, lifted or still active."""

    at: float = Field(
        description="Unix time at which the node was cordoned", examples=[1767225800.0]
    )
    by: str = Field(
        description="name of the token whose holder cordoned the node", examples=["ada"]
    )
    reason: str = Field(examples=["its disk is slow"])
    lifted_at: float | None = Field(
        description="Unix time at which the cordon was lifted; null: not lifted", examples=[None]
    )
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
    """List the nodes that have registered. Nodes whose agent answers come first.

    A node with a value in `only_run` is listed only while its agent answers or it is cordoned.
    """
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
    """Return new credentials for a node's agent. Earlier credentials of the node become invalid."""
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

    Runs on the node continue. A node of an engine is cordoned in the engine, too, and `in_engine`
    shows whether the engine has accepted the cordon. 409: the node is already cordoned.
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
    """Delete a node from the list of nodes, and delete its key and its user on the bus.

    Records of the node's cordons and runs are kept. 409: the node's agent answers, or a run that
    has not ended was launched on the node.
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
    """Ask a node's agent to measure the machine's speed again.

    After a few seconds, `check` and `checked_at` have the result. 409: the agent does not answer,
    or ranks train on the node.
    """
    bus = settings_of(request).bus
    requests.check_node(store_of(request), bus, node, by)
    return _node(request, node)


@router.get("/history", response_model=NodeHistory, dependencies=[Depends(VIEWER)])
def get_history(
    request: Request, node: str, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> Any:
    """Return a node's runs, the verdicts that named it as slow, and its cordons, newest first."""
    with store_of(request).read() as connection:
        return slowness.history(connection, node, limit)


def _node(request: Request, node: str) -> dict[str, Any]:
    with store_of(request).read() as connection:
        return nodes.known(connection, node)
