"""REST: the data that a run's page draws, in one small response."""

from __future__ import annotations

import gzip
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from paceline_backend.api import step_models
from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.telemetry import BIGGEST, StepRange
from paceline_backend.store import attempts, reads, switches, views
from paceline_backend.store import runs as runs_store
from paceline_backend.store.quality import evaluations

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

# Maximum number of steps with `since` or `last`.
_STEPS = 2_000
# Number of newest segments. Spans without a controller are listed in `coasts`.
_SEGMENTS = 200
# The same with `since`.
_NEW_SEGMENTS = 50
_NEW_EVALUATIONS = 20
# Compression level of gzip. Levels 6 and above take twice the time for 3 % fewer bytes.
_LEVEL = 5


class ViewQuery(StepRange):
    """Query parameters that select what a view shows."""

    since: Annotated[
        int | None,
        Query(ge=-1, le=BIGGEST, description="only the steps after this one, without averaging"),
    ] = None
    last: Annotated[
        int | None,
        Query(ge=1, le=_STEPS, description="only this number of newest steps, without averaging"),
    ] = None
    points: Annotated[
        int,
        Query(ge=2, le=2000, description="maximum number of points per line of the step charts"),
    ] = views.POINTS
    columns: Annotated[
        int,
        Query(
            ge=2,
            le=views.COLUMNS,
            description="maximum number of columns of the ranks' lines and the heat map",
        ),
    ] = views.COLUMNS


@router.get("/view", response_model=step_models.RangeView, response_model_exclude_unset=True)
def view(request: Request, run: str, asked: Annotated[ViewQuery, Query()]) -> Any:
    """Return the data of charts for a range of steps: at most 300 kB, compressed, for any run.

    The response is thinned out so that each column keeps its minimum and maximum. The event stream
    `events` reports when there is more. With `since`, the response has only what is missing from a
    view up to that step.
    """
    store = store_of(request)
    since, last = asked.since, asked.last
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
        row = runs_store.get(store, run)
        world = row["world"] or row["nproc"]
        if since is not None:
            newest = reads.complete_bounds(connection, key, (None, None))[1]
            last = max(0, min(_STEPS, -1 if newest is None else newest - since))
        if last is None:
            shown = views.view(connection, key, world, asked.span, asked.points, asked.columns)
        else:
            shown = views.newest(connection, key, world, last, asked.columns)
        body = {
            "run": row,
            "begins": reads.first_step(connection, key),
            **shown,
            "switches": switches.rows(store, run),
            "segments": reads.segment_rows(
                connection, key, (None, asked.to), _SEGMENTS if since is None else _NEW_SEGMENTS
            ),
        }
        if since is not None:
            spans = attempts.spans(connection, key, row["attempt"])
            made = evaluations.read(connection, key, spans, limit=_NEW_EVALUATIONS)
            body["evaluations"] = [evaluations.shown(each, row["started_at"]) for each in made]
    return _compressed(request, step_models.RangeView.model_validate(body))


def _compressed(request: Request, model: BaseModel) -> Response:
    """Compress the response in this thread, while the event loop serves other clients."""
    body = model.model_dump_json(by_alias=True, exclude_unset=True).encode()
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        body = gzip.compress(body, _LEVEL, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)
