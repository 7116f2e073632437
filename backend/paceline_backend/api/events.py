"""A run live: a snapshot, and from its position on the events."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Annotated, Any

import redis
import redis.asyncio
from fastapi import APIRouter, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator
from starlette.concurrency import run_in_threadpool

from paceline.wire import (
    ENDED,
    live,
)
from paceline.wire.bus import connect
from paceline_backend.api import step_models
from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.feed import BEGINNING, Feed
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.api.telemetry import Points
from paceline_backend.store import (
    reads,
    switches,
)
from paceline_backend.store import runs as runs_store

log = logging.getLogger(__name__)
router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS)

_SEGMENTS = 2_000  # of a snapshot

_NUMBER = r"^\d+-\d+$"  # of an entry
_LONGEST_NUMBER = 41  # two of 64 bits


def _known(position: str | None) -> str | None:
    """Refuses what the bus would: it could be told from an outage only by trying."""
    if position is not None and max(_number(position)) >= 2**64:
        raise ValueError("holds a number of more than 64 bits")
    return position


@router.get("/snapshot", response_model=step_models.Snapshot, response_model_exclude_unset=True)
def snapshot(
    request: Request,
    run: str,
    points: Points = 1000,
    last: Annotated[
        int | None,
        Query(ge=1, le=5000, description="only the newest so many steps, each by itself"),
    ] = None,
    worker_last: Annotated[
        int | None, Query(ge=1, le=5000, description="of each worker's; default: `last`")
    ] = None,
) -> Any:
    """All that a page needs at once; what happens after it comes with `events?since=`.

    With `last` its cost does not grow with the run.
    """
    store = store_of(request)
    # The position first: what is committed while we read comes again as an event. No harm.
    since = _position(settings_of(request).bus, run)
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
        row = runs_store.get(store, run)
        world = row["world"]
        span: reads.Range = (None, None)
        worker_span = span
        if last is not None:
            newest = -1 if row["step"] is None else row["step"]
            span = (max(0, newest - last + 1), newest)
            cells = reads.shown_steps(world, worker_last or last)
            worker_span = (max(0, newest - cells + 1), newest)
            points = 5001  # more than either has steps
        return {
            "since": since,
            "run": row,
            "begins": reads.first_step(connection, key),
            "steps": reads.step_columns(connection, key, span, points),
            "worker_steps": reads.worker_step_columns(
                connection, key, worker_span, points, every=reads.shown_every(world)
            ),
            "switches": switches.rows(store, run),
            "segments": reads.segment_rows(connection, key, (span[0], None), _SEGMENTS),
        }


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"},
        204: {"description": "the run has ended, and nothing came after `since`"},
    },
)
async def events(
    request: Request,
    run: str,
    since: Annotated[
        str | None,
        Query(
            pattern=_NUMBER,
            max_length=_LONGEST_NUMBER,
            description="position of a snapshot; default: now",
        ),
        AfterValidator(_known),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(pattern=_NUMBER, max_length=_LONGEST_NUMBER), AfterValidator(_known)
    ] = None,
) -> Response:
    """What happens to a run, as it is committed; ends when the run has ended and all was told.

    A browser that reconnects says in `Last-Event-ID` where it was, which counts more than `since`.
    """
    store, bus = store_of(request), settings_of(request).bus
    row = await run_in_threadpool(runs_store.get, store, run)
    newest = await run_in_threadpool(_position, bus, run)
    position = last_event_id or since or newest
    ended = row["state"] in ENDED
    if ended and _number(position) >= _number(newest):
        return Response(status_code=HTTPStatus.NO_CONTENT)
    feed = Feed(request, store, bus, run, position, ended, row["world"])
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(feed.stream(), media_type="text/event-stream", headers=headers)


def _position(bus: str, run: str) -> str:
    """The newest entry's id; the beginning where there is none, or no bus to ask."""
    with connect(bus) as client:
        try:
            newest: Any = client.xrevrange(live(run), count=1)
        except redis.RedisError as error:
            log.warning("the position of run %s is unknown: %s", run, error)
            return BEGINNING
    return str(newest[0][0].decode()) if newest else BEGINNING


def _number(position: str) -> tuple[int, int]:
    ms, _, count = position.partition("-")
    return int(ms), int(count)
