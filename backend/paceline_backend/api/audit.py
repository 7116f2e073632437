"""REST: the audit log, as a whole or for one run.

Operators can read all changes, including changes of deleted runs. Viewers can read only the changes
of a run that exists.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.queries import Page, PageQuery
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import store_of
from paceline_backend.store import audit
from paceline_backend.store.runs import key_of

router = APIRouter()


class RunChange(BaseModel):
    """A change of a run."""

    at: float = Field(description="Unix time of the change", examples=[1767225700.0])
    who: str = Field(
        description="requester of the change: a token or user by name, `auto` or the control plane",
        examples=["ada"],
    )
    via: str = Field(
        description="name of the client program, as it reports itself; empty: unknown",
        examples=["cli"],
    )
    action: str = Field(examples=["run.policy"])
    revision: int | None = Field(
        description="revision of the run after the change; null: no run was changed",
        examples=[3],
    )
    why: str = Field(examples=["rank 3 is too slow"])
    details: dict[str, Any] = Field(examples=[{"policy": "chronica"}])


class RunChanges(BaseModel):
    """Changes of a run, newest first."""

    items: list[RunChange]
    next_cursor: str | None = Field(
        description="`cursor` for the next page; null: this is the last page", examples=["MTIz"]
    )


class AuditEntry(RunChange):
    """A change of any kind, of a run or of the control plane."""

    scope: str = Field(
        description="role of the requester; empty: the control plane itself", examples=["operator"]
    )
    address: str = Field(
        description="network address of the client; empty: none", examples=["10.0.0.7"]
    )
    run: str | None = Field(examples=["3f9a1c07be52"])
    target: str = Field(
        description="changed object other than a run, such as a token's name; empty: none",
        examples=[""],
    )


class AuditPage(BaseModel):
    """Changes, newest first."""

    items: list[AuditEntry]
    next_cursor: str | None = Field(
        description="`cursor` for the next page; null: this is the last page", examples=["MTIz"]
    )


class ChangeQuery(BaseModel):
    """Query parameters that select changes in the audit log."""

    run: Annotated[str | None, Query(max_length=200, description="only changes of this run")] = None
    who: Annotated[
        str | None,
        Query(max_length=200, description="only changes that this requester (`who`) made"),
    ] = None
    action: Annotated[
        str | None,
        Query(max_length=100, description="only changes with this action", examples=["run.policy"]),
    ] = None
    since: Annotated[float | None, Query(description="only changes at this Unix time or later")] = (
        None
    )


@router.get(
    "/audit",
    response_model=AuditPage,
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(OPERATOR)],
)
def list_changes(request: Request, which: Annotated[ChangeQuery, Query()], page: Page) -> Any:
    """List changes of the control plane and of all runs, even deleted ones, newest first."""
    return _page(request, audit.ChangeFilter(**which.model_dump()), page)


@router.get(
    "/runs/{run}/audit",
    response_model=RunChanges,
    responses=RUN_REFUSALS,
    dependencies=[Depends(VIEWER)],
)
def list_changes_of_run(request: Request, run: str, page: Page) -> Any:
    """List the changes of a run, newest first."""
    with store_of(request).read() as connection:
        key_of(connection, run)
    return _page(request, audit.ChangeFilter(run), page)


def _page(request: Request, which: audit.ChangeFilter, page: PageQuery) -> dict[str, Any]:
    with store_of(request).read() as connection:
        items, following = audit.page(connection, which, page.limit, page.cursor)
    return {"items": items, "next_cursor": following}
