"""REST: the list of runs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request

from paceline_backend.api import models
from paceline_backend.api.audit.routes import Page
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.history.filters import Filter
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of, with_costs
from paceline_backend.store import runs as runs_store

router = APIRouter()

_INVALID = HTTPStatus.UNPROCESSABLE_ENTITY
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


@router.get(
    "/runs",
    response_model=models.RunPage,
    responses=documented(_INVALID, HTTPStatus.SERVICE_UNAVAILABLE),
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
    try:
        items, following = runs_store.page(
            store_of(request), which, sort=sort, limit=page.limit, cursor=page.cursor
        )
    except runs_store.CursorError as error:
        errors = [{"field": "cursor", "message": str(error)}]
        raise ProblemError(_INVALID, str(error), errors=errors) from error
    return {"items": with_costs(request, items), "next_cursor": following}
