"""REST: cordons and checks of nodes, and the history of a node."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from paceline_backend import requests
from paceline_backend.api import models as common
from paceline_backend.api.audit import QueryRequester, requester_of
from paceline_backend.api.errors import documented
from paceline_backend.api.nodes import models
from paceline_backend.api.rules import ADMIN, OPERATOR, VIEWER
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.store import nodes
from paceline_backend.store.nodes import slowness

_REFUSALS = documented(
    HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE
)
_CHANGES = {**_REFUSALS, **documented(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT)}

router = APIRouter(prefix="/nodes/{node}", responses=_REFUSALS)


@router.put(
    "/cordon", response_model=common.NodeInfo, responses=_CHANGES, dependencies=[Depends(OPERATOR)]
)
def cordon_node(request: Request, node: str, body: models.NewCordon) -> Any:
    """Cordon a node: it gets no new run and joins none, even if a request names it.

    Runs on the node continue. A node of an engine is cordoned in the engine, too; `in_engine` shows
    whether that is done. The request needs no `If-Match`: 409 reports that the node is already
    cordoned.
    """
    by = requester_of(request, body.by, body.reason)
    requests.cordon(store_of(request), node, by)
    return _node(request, node)


@router.delete(
    "/cordon", response_model=common.NodeInfo, responses=_CHANGES, dependencies=[Depends(OPERATOR)]
)
def uncordon_node(request: Request, node: str, by: QueryRequester) -> Any:
    """Lift the cordon of a node. 409: the node is not cordoned."""
    requests.uncordon(store_of(request), node, by)
    return _node(request, node)


@router.delete(
    "", response_model=common.NodeInfo, responses=_CHANGES, dependencies=[Depends(ADMIN)]
)
def forget_node(request: Request, node: str, by: QueryRequester) -> Any:
    """Delete a node from the list, and revoke its key and its user of the bus.

    Its cordons and its part in runs are kept. 409: its agent answers, or a run uses the node.
    """
    bus = settings_of(request).bus
    return requests.sessions.forget(store_of(request), bus, node, by)


@router.post(
    "/check",
    status_code=HTTPStatus.ACCEPTED,
    response_model=common.NodeInfo,
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


@router.get("/history", response_model=models.NodeHistory, dependencies=[Depends(VIEWER)])
def get_history(
    request: Request, node: str, limit: Annotated[int, Query(ge=1, le=500)] = 50
) -> Any:
    """Return a node's runs, the verdicts that named it slow, and its cordons; newest first."""
    with store_of(request).read() as connection:
        return slowness.history(connection, node, limit)


def _node(request: Request, node: str) -> dict[str, Any]:
    with store_of(request).read() as connection:
        return nodes.known(connection, node)
