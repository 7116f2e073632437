"""REST: a run's logs and their content.

Only operators may read logs, because a script may print data that viewers must not see, such as its
environment variables.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool

from paceline.wire.asking import MOST_BYTES, MOST_LINES, ReadLog
from paceline_backend.api import models
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.identity import identity_of
from paceline_backend.api.live.clients import EventStream
from paceline_backend.api.logs.follow import Follow
from paceline_backend.api.logs.models import LogExcerpt, Output, RunLogs
from paceline_backend.api.logs.reading import Logs
from paceline_backend.api.rules import OPERATOR
from paceline_backend.requests import InvalidRequestError
from paceline_backend.store import runs

_REFUSALS = {
    **RUN_REFUSALS,
    **documented(HTTPStatus.CONFLICT, HTTPStatus.GATEWAY_TIMEOUT),
}
router = APIRouter(prefix="/runs/{run}/logs", responses=_REFUSALS, dependencies=[Depends(OPERATOR)])

_MOST_ATTEMPT = 2**31 - 1
_MOST_OFFSET = 2**53 - 1
_POSITION = r"^[0-9]{1,10}-[0-9]{1,15}$"

Rank = Annotated[
    str, Path(pattern="^(launcher|[0-9]{1,9})$", description="number of a rank, or `launcher`")
]
OutputOf = Annotated[Output, Query(description="output of a rank; the launcher's log has both")]
Attempt = Annotated[
    int | None,
    Query(ge=0, le=_MOST_ATTEMPT, description="default: the newest attempt that has this log"),
]
Tail = Annotated[
    int | None,
    Query(
        ge=1,
        le=MOST_LINES,
        description="only this number of last lines; not together with `offset`",
    ),
]
Offset = Annotated[
    int | None,
    Query(
        ge=-_MOST_OFFSET,
        le=_MOST_OFFSET,
        description="offset of the first byte; below 0: counted from the end; default: 0",
    ),
]
Limit = Annotated[int, Query(ge=4, le=MOST_BYTES, description="maximum number of bytes")]
Node = Annotated[
    models.NodeName | None,
    Query(
        description="node that has the log; required for `launcher` if several nodes have such a "
        "log"
    ),
]


def _logs(request: Request) -> Logs:
    logs: Logs = request.app.state.logs
    return logs


def _wanted(
    rank: Rank,
    output: OutputOf = "stdout",
    attempt: Attempt = None,
    tail: Tail = None,
    offset: Offset = None,
    limit: Limit = 65_536,
) -> ReadLog:
    if tail is not None and offset is not None:
        raise InvalidRequestError("offset", "give tail or offset, not both")
    number = None if rank == "launcher" else int(rank)
    return ReadLog(number, output, attempt, offset or 0, limit, tail)


Wanted = Annotated[ReadLog, Depends(_wanted)]


@router.get("", response_model=RunLogs)
async def list_logs(
    request: Request,
    run: str,
    from_attempt: Annotated[
        int, Query(ge=0, le=_MOST_ATTEMPT, description="only logs of this attempt and later ones")
    ] = 0,
) -> Any:
    """List the logs that a run's nodes have now, at most 2,000 per node."""
    logs = _logs(request)
    row = await run_in_threadpool(runs.get, logs.store, run)
    listing = await logs.listing(run, from_attempt)
    return {
        "run": run,
        "state": row["state"],
        "nodes": [{"node": node, "problem": why} for node, why in listing.nodes.items()],
        "logs": [_file(node, log) for node, log in listing.logs],
    }


def _file(node: str, log: Any) -> dict[str, Any]:
    names = ("rank", "output", "attempt", "size", "modified_at", "may_grow")
    return {"node": node, **{name: getattr(log, name) for name in names}}


@router.get("/{rank}", response_model=LogExcerpt)
async def read_log(request: Request, run: str, wanted: Wanted, node: Node = None) -> Any:
    """Return a part of a log: its beginning, its last lines, or the text from an offset on."""
    part = await _logs(request).part(run, wanted, node)
    output = wanted.output if wanted.rank is not None else None
    return {"run": run, "rank": wanted.rank, "output": output, **asdict(part)}


@router.get(
    "/{rank}/stream",
    response_class=StreamingResponse,
    responses={
        **documented(HTTPStatus.TOO_MANY_REQUESTS),
        200: {"content": {"text/event-stream": {}}, "description": "Server-sent events"},
        204: {"description": "the run has ended, and no text follows the position"},
    },
)
async def follow_log(
    request: Request,
    run: str,
    wanted: Wanted,
    node: Node = None,
    last_event_id: Annotated[str | None, Header(pattern=_POSITION, max_length=26)] = None,
) -> Response:
    """Stream the text that is added to a log, attempt after attempt.

    The stream ends when the run has ended and all text was sent. It also ends when the client's
    token is revoked or has expired. `Last-Event-ID` resumes a stream and takes precedence over
    `attempt`, `offset` and `tail`.
    """
    if last_event_id is not None:
        attempt, offset = map(int, last_event_id.split("-"))
        wanted = ReadLog(wanted.rank, wanted.output, attempt, offset, wanted.limit)
    # A stream lasts for hours, so its token may expire or be revoked meanwhile.
    state = request.app.state
    allowed = partial(state.rights.valid, identity_of(request).token)
    followed = Follow(_logs(request), run, wanted, node, state.closing, allowed)
    if await followed.over():
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return EventStream(followed.stream(), state.streams)
