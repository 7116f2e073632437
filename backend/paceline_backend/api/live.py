"""REST: the live view of a run: an event stream, and the data that a page draws.

An event only reports a change: `{type, step, revision}` has the earliest new step, if any, and the
run's revision. The page then requests the new data with `GET view?since=`.
"""

from __future__ import annotations

import gzip
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from paceline_backend.api.change_reader import ChangeReader
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.event_streams import COMMENT_S, SHUTDOWN_CHECK_S, EventStream, encoded
from paceline_backend.api.identity import identity_of
from paceline_backend.api.models import EvaluationInfo, RunInfo
from paceline_backend.api.queries import BIGGEST, StepRange
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import store_of
from paceline_backend.api.switching import SwitchInfo
from paceline_backend.api.telemetry import Coast, Column, SegmentInfo, StepAxis, StepColumns
from paceline_backend.store import StoreUnavailableError, attempts, chart_views, reads, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.quality import evaluations

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

# Maximum number of steps in a view that is requested with `since` or `last`.
_VIEW_STEPS = 2_000
# Maximum number of segments in a view. The newest segments are returned.
_VIEW_SEGMENTS = 200
# Maximum numbers of segments and of evaluations in a view with `since`. The newest are returned.
_NEW_SEGMENTS = 50
_NEW_EVALUATIONS = 20
# Compression level of gzip. Levels 6 and above take twice the time for 3 % fewer bytes.
_LEVEL = 5


class Lines(StepAxis):
    """Steps of ranks: ``column[rank][step]``. Empty if the run has more than 16 ranks."""

    ranks: list[int] = Field(examples=[[0, 1]])
    compute_s: list[Column] = Field(examples=[[[0.19, 0.2], [0.2, 0.19]]])
    ett_s: list[Column]
    share: list[Column]
    compute_s_min: list[Column]
    compute_s_max: list[Column]


class Heat(StepAxis):
    """Heat map of compute times: a cell has the maximum over its ranks (row) and steps (column).

    ``compute_…`` and ``share_…`` have one value for each column: a quantile of the rows' mean
    compute times, or of the rows' mean shares of the load.
    """

    world: int = Field(description="number of ranks of the run", examples=[1024])
    together: int = Field(
        description="number of ranks per row of the heat map; 1 for up to 256 ranks", examples=[4]
    )
    rows: int = Field(
        description="number of rows of the heat map; row k begins with rank k × `together`",
        examples=[256],
    )
    low: float = Field(
        description="minimum compute time of all cells of the heat map, in seconds", examples=[0.1]
    )
    high: float = Field(
        description="maximum compute time of all cells of the heat map, in seconds", examples=[0.9]
    )
    cells: str = Field(
        description="cells of the heat map, row by row, as base64 of one byte per cell; byte 0: "
        "unknown; byte k: low × (high ÷ low) ** ((k − 1) ÷ 254) seconds",
        examples=["Af8AAQ=="],
    )
    compute_p10: Column
    compute_p50: Column
    compute_p90: Column
    share_min: Column
    share_p50: Column
    share_p90: Column
    share_max: Column


class RangeView(BaseModel):
    """Data of the charts for a range of steps."""

    run: RunInfo
    begins: int | None = Field(
        description="first complete step of the run; null: none", examples=[0]
    )
    steps: StepColumns
    worker_steps: Lines
    heat: Heat
    coasts: list[Coast] = Field(
        description="first and last step of each span of steps that no controller planned"
    )
    switches: list[SwitchInfo]
    segments: list[SegmentInfo] = Field(
        description="newest 200 segments of the run (50 with `since`), oldest first"
    )
    evaluations: list[EvaluationInfo] | None = Field(
        default=None,
        description="newest 20 evaluations of the run, oldest first; only with `since`",
    )


class ViewQuery(StepRange):
    """Query parameters that select what a view shows."""

    since: Annotated[
        int | None,
        Query(
            ge=-1,
            le=BIGGEST,
            description="return only steps after this step, each as a point of its own",
        ),
    ] = None
    last: Annotated[
        int | None,
        Query(
            ge=1,
            le=_VIEW_STEPS,
            description="return only this number of newest steps, each as a point of its own",
        ),
    ] = None
    points: Annotated[
        int,
        Query(ge=2, le=2000, description="maximum number of points per line in charts of steps"),
    ] = chart_views.POINTS
    columns: Annotated[
        int,
        Query(
            ge=2,
            le=chart_views.CHART_COLUMNS,
            description="maximum number of points of a rank's line, and of columns of the heat map",
        ),
    ] = chart_views.CHART_COLUMNS


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        **documented(HTTPStatus.TOO_MANY_REQUESTS),
        200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"},
    },
)
async def events(request: Request, run: str) -> Response:
    """Stream an event whenever a change of the run is committed.

    The client then requests the new data with `GET view?since=`. The stream ends when the run has
    ended, or when the client's token is revoked or has expired.
    """
    reader: ChangeReader = request.app.state.reader
    # This call raises an error if the run is unknown.
    await run_in_threadpool(runs_store.get, reader.store, run)
    allowed = partial(request.app.state.rights.valid, identity_of(request).token)
    stream = _stream(reader, run, request.app.state.closing, allowed)
    return EventStream(stream, request.app.state.streams)


async def _stream(
    reader: ChangeReader,
    run: str,
    closing: Callable[[], bool],
    allowed: Callable[[], Awaitable[bool]],
) -> AsyncIterator[bytes]:
    follower = reader.join(run)
    # Outage that was last reported to the client.
    awaited = None
    sent_at = time.monotonic()
    try:
        yield b": welcome\n\n"
        # If the database is unavailable, the reader gives all clients an event after the outage.
        with suppress(StoreUnavailableError):
            await reader.tell_end(run, follower)
        while not closing() and await allowed():
            if reader.awaited != awaited:
                awaited = reader.awaited
                yield encoded({"type": "waiting", "for": awaited})
            elif (event := follower.take()) is not None:
                yield encoded(event)
            elif follower.is_last:
                return
            elif time.monotonic() - sent_at > COMMENT_S:
                yield b": still here\n\n"
            else:
                await follower.wait(SHUTDOWN_CHECK_S)
                continue
            sent_at = time.monotonic()
    finally:
        reader.leave(run, follower)


@router.get("/view", response_model=RangeView, response_model_exclude_unset=True)
def view(request: Request, run: str, asked: Annotated[ViewQuery, Query()]) -> Any:
    """Return the data of charts for a range of steps: at most 300 kB, compressed, for any run.

    If a point of a chart combines several steps, the response also has their minimum and maximum.
    With `since`, the response has only the data that is newer than this step. The event stream
    `events` reports new data.
    """
    store = store_of(request)
    since, last = asked.since, asked.last
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
        row = runs_store.get(store, run)
        world = row["world"] or row["nproc"]
        if since is not None:
            newest = reads.complete_bounds(connection, key, (None, None))[1]
            last = max(0, min(_VIEW_STEPS, -1 if newest is None else newest - since))
        if last is None:
            shown = chart_views.view(
                connection, key, world, asked.span, asked.points, asked.columns
            )
        else:
            shown = chart_views.newest(connection, key, world, last, asked.columns)
        body = {
            "run": row,
            "begins": reads.first_step(connection, key),
            **shown,
            "switches": switches.rows(store, run),
            "segments": reads.segment_rows(
                connection,
                key,
                (None, asked.to),
                _VIEW_SEGMENTS if since is None else _NEW_SEGMENTS,
            ),
        }
        if since is not None:
            spans = attempts.spans(connection, key, row["attempt"])
            made = evaluations.read(connection, key, spans, limit=_NEW_EVALUATIONS)
            body["evaluations"] = [evaluations.shown(each, row["started_at"]) for each in made]
    return _compressed(request, RangeView.model_validate(body))


def _compressed(request: Request, model: BaseModel) -> Response:
    """Return the model as JSON, compressed in this thread to keep the event loop free."""
    body = model.model_dump_json(by_alias=True, exclude_unset=True).encode()
    headers = {"Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("Accept-Encoding", ""):
        body = gzip.compress(body, _LEVEL, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, media_type="application/json", headers=headers)
