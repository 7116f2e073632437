"""REST: the audit log, of all runs or of one."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from paceline_backend.api.audit import models
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.store import Store, audit
from paceline_backend.store.runs import CursorError, key_of

router = APIRouter()


class PageQuery(BaseModel):
    """Query parameters that select a page of a list."""

    limit: Annotated[int, Query(ge=1, le=500)] = 50
    cursor: Annotated[
        str | None, Query(max_length=100, description="`next_cursor` of the previous page")
    ] = None


class ChangeQuery(BaseModel):
    """Query parameters that select changes in the audit log."""

    run: Annotated[str | None, Query(max_length=200, description="only changes of this run")] = None
    who: Annotated[
        str | None, Query(max_length=200, description="only changes by this requester")
    ] = None
    action: Annotated[
        str | None,
        Query(max_length=100, description="only changes with this action", examples=["run.policy"]),
    ] = None
    since: Annotated[float | None, Query(description="only changes at this Unix time or later")] = (
        None
    )


Page = Annotated[PageQuery, Query()]


@router.get(
    "/audit",
    response_model=models.AuditPage,
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(OPERATOR)],
)
def list_changes(request: Request, which: Annotated[ChangeQuery, Query()], page: Page) -> Any:
    """List who changed what, newest first, including changes of deleted runs."""
    return _page(request, audit.ChangeFilter(**which.model_dump()), page)


@router.get(
    "/runs/{run}/audit",
    response_model=models.RunChanges,
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_changes_of_run(request: Request, run: str, page: Page) -> Any:
    """List who changed the run, newest first."""
    store: Store = request.app.state.store
    with store.read() as connection:
        key_of(connection, run)
    return _page(request, audit.ChangeFilter(run), page)


def _page(request: Request, which: audit.ChangeFilter, page: PageQuery) -> dict[str, Any]:
    store: Store = request.app.state.store
    try:
        with store.read() as connection:
            items, following = audit.page(connection, which, page.limit, page.cursor)
    except CursorError as error:
        errors = [{"field": "cursor", "message": str(error)}]
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), errors=errors) from error
    return {"items": items, "next_cursor": following}
