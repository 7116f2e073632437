"""REST: the event stream of a run."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.live.clients import EventStream
from paceline_backend.api.live.reader import ChangeReader
from paceline_backend.api.rules import VIEWER
from paceline_backend.store import StoreUnavailableError
from paceline_backend.store import runs as runs_store

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

# Interval at which a stream checks whether the server shuts down.
_AGAIN_S = 0.5  # seconds
# Proxies close connections that are silent for longer.
_COMMENT_S = 10.0  # seconds


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

    `GET view?since=` returns what has changed. The stream ends when the run has ended, and when the
    client's token is revoked or has expired.
    """
    reader: ChangeReader = request.app.state.reader
    # This call raises an error for an unknown run.
    await run_in_threadpool(runs_store.get, reader.store, run)
    # A stream lasts for hours, so its token may expire or be revoked meanwhile.
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
    # The outage that the client was last informed about.
    awaited = None
    spoke = time.monotonic()
    try:
        yield b": welcome\n\n"
        # If the database is away, this client gets an event with all others when it is back.
        with suppress(StoreUnavailableError):
            await reader.tell_end(run, follower)
        while not closing() and await allowed():
            if reader.awaited != awaited:
                awaited = reader.awaited
                yield _encoded({"type": "waiting", "for": awaited})
            elif (event := follower.take()) is not None:
                yield _encoded(event)
            elif follower.over:
                return
            elif time.monotonic() - spoke > _COMMENT_S:
                yield b": still here\n\n"
            else:
                await follower.wait(_AGAIN_S)
                continue
            spoke = time.monotonic()
    finally:
        reader.leave(run, follower)


def _encoded(event: dict[str, Any]) -> bytes:
    return b"event: message\ndata: %s\n\n" % orjson.dumps(event)
