"""REST: the nodes of a run that trains on several nodes."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AfterValidator, BaseModel, Field

from paceline.wire import State
from paceline_backend import requests
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.models import ChangeRequest, NodeName, Text, Variable, bounded_variables
from paceline_backend.api.preconditions import (
    CHANGE_REFUSALS,
    Expected,
    QueryRequester,
    requester_of,
)
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.insight import replacements
from paceline_backend.store import runs
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.nodes import run_nodes

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS)


class RunNodeInfo(BaseModel):
    """A node of a run that was launched on several nodes."""

    node: str = Field(examples=["node-1"])
    host: bool = Field(
        description="true: the node serves the rendezvous of the run's ranks", examples=[True]
    )
    state: State = Field(description="state of the run on this node", examples=["running"])
    alive: bool = Field(
        description="true: the node's agent answers; false while `state` is running: the agent "
        "does not answer, but steps of other ranks show that the node trains",
        examples=[True],
    )
    attempt: int = Field(examples=[0])
    first_attempt: int = Field(
        description="first attempt of the latest launch on the node; lower than `first_attempt` of "
        "the run if the run's latest launch did not include the node",
        examples=[0],
    )
    exit_code: int | None = Field(examples=[None])
    message: str | None = Field(
        description="why the run failed on the node; null: it did not fail", examples=[None]
    )
    launched_at: float = Field(examples=[1767225600.0])
    reported_at: float | None = Field(
        description="Unix time of the node's last report about the run, by the node's clock; null: "
        "no report yet",
        examples=[1767225603.5],
    )
    leaving: bool = Field(description="true: the node was asked to leave the run", examples=[False])
    replaces: str | None = Field(
        description="slow or lost node that this node replaces in the run; null: none",
        examples=[None],
    )


class Join(ChangeRequest):
    """Request to add nodes to a run."""

    nodes: (
        Annotated[int, Field(ge=1, le=1000)]
        | Annotated[list[NodeName], Field(min_length=1, max_length=1000)]
    ) = Field(description="number of nodes to add to the run, or their names", examples=[1])
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = Field(
        default={},
        description="values of the environment variables that the run was created with, which the "
        "server does not store",
    )


class Replace(ChangeRequest):
    """Request to replace a node of a run."""

    node: NodeName | None = Field(
        default=None,
        description="node that joins the run; default: a spare of the run, or else the least busy "
        "node; omit it for a run on an engine, which chooses the node",
        examples=[None],
    )
    cordon: bool = Field(
        default=False, description="true: also cordon the node that leaves the run"
    )
    env: Annotated[dict[Variable, Text], AfterValidator(bounded_variables)] = Field(
        default={},
        description="values of the environment variables that the run was created with, which the "
        "server does not store",
    )


class Replacement(BaseModel):
    """Replacement of a node of a run by another node."""

    at: float = Field(examples=[1767225800.0])
    who: str = Field(examples=["ada"])
    why: str = Field(examples=["n2 is slow"])
    node: str = Field(description="node that leaves the run", examples=["n2"])
    other: str | None = Field(
        description="node that joins the run; null: the run's engine has not provided it yet",
        examples=["n3"],
    )
    state: Literal["waiting", "done", "failed"] = Field(
        description="waiting: the new node has not joined yet; done: it has joined; failed: it did "
        "not join, the request was cancelled, or the run ended",
        examples=["done"],
    )
    step: int = Field(
        description="newest complete step when the replacement was requested", examples=[240]
    )
    first_step: int | None = Field(
        description="first step with the new node; null: none yet", examples=[250]
    )
    before_s: float | None = Field(
        description="mean step time in seconds, over up to 100 steps before the request; null: "
        "unknown",
        examples=[0.31],
    )
    forecast_s: float | None = Field(
        description="forecast of the step time in seconds, if the node were as fast as the other "
        "nodes; null: no forecast",
        examples=[0.12],
    )
    after_s: float | None = Field(
        description="mean step time in seconds with the new node, over up to 100 steps after the "
        "first 20; null: no such steps yet",
        examples=[0.13],
    )
    after_steps: int = Field(
        description="number of steps over which `after_s` is the mean", examples=[100]
    )


@router.get(
    "/nodes",
    response_model=list[RunNodeInfo],
    dependencies=[Depends(VIEWER)],
)
def list_run_nodes(request: Request, run: str) -> Any:
    """List the nodes on which a run was launched; empty for a run that trains on one node only."""
    with store_of(request).read() as connection:
        return run_nodes.listed(connection, runs.key_of(connection, run))


@router.post(
    "/nodes",
    status_code=HTTPStatus.ACCEPTED,
    response_model=list[RunNodeInfo],
    responses={**CHANGE_REFUSALS, **documented(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def add_run_nodes(request: Request, run: str, expected: Expected, body: Join) -> Any:
    """Launch a run on further nodes, up to `nodes_max`. The nodes join when they are ready."""
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why, body.operator)
    requests.join(store, bus, RequestedChange(run, by, expected), body.nodes, body.env)
    return list_run_nodes(request, run)


@router.delete(
    "/nodes/{node}",
    status_code=HTTPStatus.ACCEPTED,
    response_model=list[RunNodeInfo],
    responses={**CHANGE_REFUSALS, **documented(HTTPStatus.CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def remove_run_node(
    request: Request,
    run: str,
    node: str,
    expected: Expected,
    by: QueryRequester,
    cordon: Annotated[bool, Query(description="true: also cordon the node")] = False,
) -> Any:
    """End a run's processes on one of its nodes. The other nodes continue without it."""
    store, bus = store_of(request), settings_of(request).bus
    requests.leave(store, bus, RequestedChange(run, by, expected), node, cordon=cordon)
    return list_run_nodes(request, run)


@router.post(
    "/nodes/{node}/replace",
    status_code=HTTPStatus.ACCEPTED,
    response_model=list[RunNodeInfo],
    responses={**CHANGE_REFUSALS, **documented(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def replace_run_node(
    request: Request, run: str, node: str, expected: Expected, body: Replace | None = None
) -> Any:
    """Replace a node of a run: launch the run on a new node, and then remove the old node.

    If the run already trains on `nodes_max` nodes, the new node joins at the moment at which the
    old node leaves, so that the ranks restart only once.
    """
    body = body or Replace()
    store, bus = store_of(request), settings_of(request).bus
    by = requester_of(request, body.by, body.why, body.operator)
    wanted = requests.NodeReplacement(node, body.node, body.cordon)
    requests.replace(store, bus, RequestedChange(run, by, expected), wanted, body.env)
    return list_run_nodes(request, run)


@router.delete(
    "/nodes/{node}/replace",
    status_code=HTTPStatus.ACCEPTED,
    response_model=list[RunNodeInfo],
    responses={**CHANGE_REFUSALS, **documented(HTTPStatus.CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def keep_run_node(
    request: Request, run: str, node: str, expected: Expected, by: QueryRequester
) -> Any:
    """Cancel the replacement of a node while the engine has not provided the new node yet."""
    store, bus = store_of(request), settings_of(request).bus
    requests.withdraw(store, bus, RequestedChange(run, by, expected), node)
    return list_run_nodes(request, run)


@router.get("/replacements", response_model=list[Replacement], dependencies=[Depends(VIEWER)])
def list_replacements(request: Request, run: str) -> Any:
    """List replacements of nodes, oldest first, with step times before and after each."""
    with store_of(request).read() as connection:
        return replacements.listed(connection, run)
