"""A run live: a snapshot, and from its position on the events."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator
from starlette.concurrency import run_in_threadpool

from paceline.wire import ENDED
from paceline_backend.api import step_models
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.live.clients import EventStream
from paceline_backend.api.live.feed import Feed
from paceline_backend.api.live.reader import Reader, number
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.telemetry import Points
from paceline_backend.store import reads, switches
from paceline_backend.store import runs as runs_store

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

_SEGMENTS = 2_000  # of a snapshot

_NUMBER = r"^\d+-\d+$"  # of an entry
_LONGEST_NUMBER = 41  # two of 64 bits


def _known(position: str | None) -> str | None:
    """Refuses what the bus would: it could be told from an outage only by trying."""
    if position is not None and max(number(position)) >= 2**64:
        raise ValueError("holds a number of more than 64 bits")
    return position


async def _position(request: Request, run: str) -> str:
    reader: Reader = request.app.state.reader
    return await reader.position(run)


# A dependency is asked before the route reads the database. What is committed in between comes
# again as an event, which does no harm.
Position = Annotated[str, Depends(_position)]


@router.get("/snapshot", response_model=step_models.Snapshot, response_model_exclude_unset=True)
def snapshot(
    request: Request,
    run: str,
    since: Position,
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
        **documented(HTTPStatus.TOO_MANY_REQUESTS),
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

    It also ends when the client's token is revoked or has expired.

    A browser that reconnects says in `Last-Event-ID` where it was, which counts more than `since`.
    """
    reader: Reader = request.app.state.reader
    row = await run_in_threadpool(runs_store.get, reader.store, run)
    newest = await reader.position(run)
    position = last_event_id or since or newest
    ended = row["state"] in ENDED
    if ended and number(position) >= number(newest):
        return Response(status_code=HTTPStatus.NO_CONTENT)
    closing = request.app.state.closing
    # A stream lasts for hours: its token may be revoked, or expire.
    allowed = partial(request.app.state.rights.valid, identity_of(request).token)
    feed = Feed(reader, run, position, newest, row["world"], ended, closing, allowed)
    return EventStream(feed.stream(), request.app.state.streams)
