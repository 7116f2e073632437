"""REST: the audit log, of all runs or of one."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from paceline_backend.api.audit import models
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.store import Store, audit
from paceline_backend.store.runs import CursorError, key_of

router = APIRouter()

Limit = Annotated[int, Query(ge=1, le=500)]
Cursor = Annotated[
    str | None, Query(max_length=100, description="`next_cursor` of the previous page")
]


@router.get(
    "/audit",
    response_model=models.AuditPage,
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(OPERATOR)],
)
def list_changes(
    request: Request,
    run: Annotated[
        str | None, Query(max_length=200, description="only changes of this run")
    ] = None,
    who: Annotated[
        str | None, Query(max_length=200, description="only changes by this requester")
    ] = None,
    action: Annotated[
        str | None,
        Query(max_length=100, description="only changes with this action", examples=["run.policy"]),
    ] = None,
    since: Annotated[
        float | None, Query(description="only changes at this Unix time or later")
    ] = None,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Any:
    """List who changed what, newest first, including changes of deleted runs."""
    narrowed = {"run": run, "who": who, "action": action, "since": since}
    return _page(request, limit=limit, cursor=cursor, **narrowed)


@router.get(
    "/runs/{run}/audit",
    response_model=models.RunChanges,
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_changes_of_run(
    request: Request, run: str, limit: Limit = 50, cursor: Cursor = None
) -> Any:
    """List who changed the run, newest first."""
    store: Store = request.app.state.store
    with store.read() as connection:
        key_of(connection, run)
    return _page(request, run=run, limit=limit, cursor=cursor)


def _page(request: Request, **query: Any) -> dict[str, Any]:
    store: Store = request.app.state.store
    try:
        with store.read() as connection:
            items, following = audit.page(connection, **query)
    except CursorError as error:
        errors = [{"field": "cursor", "message": str(error)}]
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), errors=errors) from error
    return {"items": items, "next_cursor": following}
