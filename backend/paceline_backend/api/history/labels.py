"""REST: tags and notes of runs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import APIRouter, Depends, Request, Response

from paceline_backend.api import models
from paceline_backend.api.audit import CHANGE_REFUSALS, Expected, QueryRequester, etag, requester_of
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.history.models import Note, Tag, TagCount
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.requests import labels
from paceline_backend.store import runs as runs_store
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.history import labels as stored

router = APIRouter()


@router.get(
    "/tags",
    response_model=list[TagCount],
    responses=documented(HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(VIEWER)],
)
def list_tags(request: Request) -> Any:
    """List all tags of runs, most used first."""
    with store_of(request).read() as connection:
        return stored.counted(connection)


@router.put(
    "/runs/{run}/tags/{tag}",
    response_model=models.RunInfo,
    responses={**RUN_REFUSALS, **documented(HTTPStatus.CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def add_tag(request: Request, run: str, tag: Tag, by: QueryRequester) -> Any:
    """Add a tag to a run. Repeating the request changes nothing, so it needs no `If-Match`."""
    labels.tag(store_of(request), run, tag, by)
    return runs_store.get(store_of(request), run)


@router.delete(
    "/runs/{run}/tags/{tag}",
    response_model=models.RunInfo,
    responses=RUN_REFUSALS,
    dependencies=[Depends(OPERATOR)],
)
def remove_tag(request: Request, run: str, tag: Tag, by: QueryRequester) -> Any:
    """Remove a tag from a run. Nothing changes if the run does not have the tag."""
    labels.untag(store_of(request), run, tag, by)
    return runs_store.get(store_of(request), run)


@router.put(
    "/runs/{run}/note",
    response_model=models.RunInfo,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(HTTPStatus.BAD_REQUEST)},
    dependencies=[Depends(OPERATOR)],
)
def set_note(request: Request, response: Response, run: str, expected: Expected, body: Note) -> Any:
    """Replace the note of a run."""
    by = requester_of(request, body.by, body.why, body.operator)
    labels.annotate(store_of(request), RequestedChange(run, by, expected), body.note)
    row = runs_store.get(store_of(request), run)
    response.headers["ETag"] = etag(row["revision"])
    return row
