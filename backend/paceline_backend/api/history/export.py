"""REST: a run's tables as files, streamed."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.history.filters import Moment
from paceline_backend.api.history.writers import MEDIA_TYPES, Format, MissingPackageError, written
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.telemetry import Ranks, StepRange, ranks_of
from paceline_backend.store import runs as runs_store
from paceline_backend.store.details.rows import TABLES, Wanted, parts

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

Table = Literal["steps", "worker-steps", "rounds", "segments", "switches"]
_FILES: dict[str, Any] = {
    media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES.values()
}


class RowQuery(StepRange):
    """Query parameters that select rows of a table."""

    ranks: Ranks = None
    since: Moment = None
    until: Moment = None


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={
        200: {"description": "The file.", "content": _FILES},
        **documented(HTTPStatus.NOT_IMPLEMENTED),
    },
)
def export(
    request: Request,
    run: str,
    table: Annotated[Table, Query(description="table to export")] = "steps",
    form: Annotated[Format, Query(alias="format")] = "csv",
    *,
    rows: Annotated[RowQuery, Query()],
) -> StreamingResponse:
    """Stream all rows of a table as a file, without thinning, at any size.

    `since` and `until` select steps, rank steps and rounds that ended in that time.
    """
    store = store_of(request)
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
    chosen = TABLES[table]
    wanted = Wanted(rows.span, ranks_of(rows.ranks), rows.since, rows.until)
    try:
        pieces = written(form, chosen.kinds, parts(store, key, chosen, wanted))
    except MissingPackageError as error:
        raise ProblemError(HTTPStatus.NOT_IMPLEMENTED, str(error)) from error
    name = f"{run}-{table}.{form}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type=MEDIA_TYPES[form], headers=headers)
