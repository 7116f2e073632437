"""REST: the logs of a run's ranks and launchers, read from the nodes that store them.

`Logs` asks the nodes, and `Follow` streams a growing log, over all attempts, as server-sent events.
The control plane never stores any part of a log. Only operators may read logs, because a script may
print data that viewers must not see, such as its environment variables.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import redis
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool

from paceline.wire import ENDED, State
from paceline.wire.asking import (
    MOST_LINES,
    MOST_LOG_BYTES,
    ListLogs,
    LogFile,
    LogList,
    LogPart,
    Output,
    ReadLog,
)
from paceline_backend.api.asking import AskedNode, LogHolder, ask, holders, missing, refusal
from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.event_streams import COMMENT_S, SHUTDOWN_CHECK_S, EventStream, encoded
from paceline_backend.api.identity import identity_of
from paceline_backend.api.models import NodeName
from paceline_backend.api.rules import OPERATOR
from paceline_backend.requests import ConflictError, InvalidRequestError
from paceline_backend.requests.asking import Asker
from paceline_backend.store import Store, StoreUnavailableError, runs
from paceline_backend.store.runs import UnknownRunError

_REFUSALS = {
    **RUN_REFUSALS,
    **documented(HTTPStatus.CONFLICT, HTTPStatus.GATEWAY_TIMEOUT),
}
router = APIRouter(prefix="/runs/{run}/logs", responses=_REFUSALS, dependencies=[Depends(OPERATOR)])

_MOST_LOG_ATTEMPT = 2**31 - 1
_MOST_OFFSET = 2**53 - 1
_POSITION = r"^[0-9]{1,10}-[0-9]{1,15}$"

# Pause before the next read of a log that has grown, and maximum pause if it has not grown.
_SOON_S, _LATER_S = 0.5, 2.0  # seconds


class NodeLog(BaseModel):
    """A log on a node."""

    node: str = Field(examples=["node-1"])
    rank: int | None = Field(
        description="rank that wrote the log; null: the node's launcher wrote it", examples=[3]
    )
    output: Output | None = Field(
        description="output of the rank that the log contains; null: the launcher's log, which "
        "contains both outputs"
    )
    attempt: int | None = Field(
        description="attempt in which the log was written; null: the launcher's log, which covers "
        "all attempts",
        examples=[0],
    )
    size: int = Field(description="size of the log in bytes", examples=[4096])
    modified_at: float = Field(
        description="Unix time at which the log was last written, by the node's clock",
        examples=[1767225600.0],
    )
    may_grow: bool = Field(
        description="true: processes that write to the log may still run", examples=[True]
    )


class RunLogs(BaseModel):
    """The logs of a run."""

    run: str = Field(examples=["3f9a1c07be52"])
    state: State = Field(description="state of the run", examples=["running"])
    nodes: list[AskedNode]
    logs: list[NodeLog] = Field(
        description="logs of the run, sorted by attempt, rank, output and node; logs of launchers "
        "come first"
    )


class LogExcerpt(BaseModel):
    """A part of a log."""

    run: str = Field(examples=["3f9a1c07be52"])
    node: str = Field(examples=["node-1"])
    rank: int | None = Field(
        description="rank that wrote the log; null: the node's launcher wrote it", examples=[3]
    )
    output: Output | None = Field(
        description="output of the rank that the log contains; null: the launcher's log, which "
        "contains both outputs"
    )
    attempt: int | None = Field(
        description="attempt in which the log was written; null: the launcher's log, which covers "
        "all attempts",
        examples=[0],
    )
    offset: int = Field(
        description="position in the log of the text's first byte, in bytes", examples=[0]
    )
    next: int = Field(
        description="position in the log after the text, in bytes; below `size`: more text follows",
        examples=[17],
    )
    size: int = Field(description="size of the whole log in bytes", examples=[17])
    may_grow: bool = Field(
        description="true: processes that write to the log may still run", examples=[True]
    )
    text: str = Field(
        description="text of this part of the log; invalid UTF-8 is replaced by U+FFFD",
        examples=["loss 0.31 at 12\n"],
    )


Rank = Annotated[
    str,
    Path(
        pattern="^(launcher|[0-9]{1,9})$",
        description="number of the rank whose log is wanted, or `launcher` for a node's launcher",
    ),
]
OutputOf = Annotated[
    Output,
    Query(description="output of the rank; ignored for a launcher, whose log contains both"),
]
Attempt = Annotated[
    int | None,
    Query(
        ge=0,
        le=_MOST_LOG_ATTEMPT,
        description="attempt in which the log was written; default: the newest that has such a log",
    ),
]
Tail = Annotated[
    int | None,
    Query(
        ge=1,
        le=MOST_LINES,
        description="number of lines to return from the end of the log; not allowed with `offset`",
    ),
]
Offset = Annotated[
    int | None,
    Query(
        ge=-_MOST_OFFSET,
        le=_MOST_OFFSET,
        description="position of the first byte to return; below 0: counted from the end of the "
        "log; default: 0",
    ),
]
Limit = Annotated[
    int, Query(ge=4, le=MOST_LOG_BYTES, description="maximum number of bytes to return")
]
Node = Annotated[
    NodeName | None,
    Query(
        description="node that has the log; required for `launcher` if the run is on several nodes"
    ),
]


@dataclass(frozen=True)
class Listing:
    """Logs that nodes have, and the reasons why logs of other nodes are missing."""

    logs: list[tuple[str, LogFile]]
    # Node → its problem; None: the node has answered.
    nodes: dict[str, str | None]


@dataclass(frozen=True)
class LogText:
    """A part of a log as text."""

    node: str
    attempt: int | None
    offset: int  # bytes
    # Position in the log after the text.
    next: int  # bytes
    size: int  # bytes
    may_grow: bool
    text: str


class Logs:
    """Reader of runs' logs."""

    def __init__(self, store: Store, asker: Asker) -> None:
        self.store = store
        self._asker = asker

    async def listing(self, run: str, from_attempt: int) -> Listing:
        """Return the logs of a run, from attempt `from_attempt` on.

        They are sorted by attempt, rank, output and node; logs of launchers come first.

        Raises:
            UnknownRunError: no such run.
            ConflictError: no node of the run has an agent that can answer.
            ProblemError: no node of the run has answered in time.
        """
        known = await run_in_threadpool(holders, self.store, run)
        answers = await ask(self.store, self._asker, known, run, ListLogs(from_attempt))
        logs, problems = [], {}
        for holder, answer in zip(known, answers, strict=True):
            problems[holder.node] = str(answer) if isinstance(answer, Exception) else None
            if isinstance(answer, LogList):
                logs += [(holder.node, log) for log in answer.logs]
        if known and all(problems.values()):
            raise refusal(answers)
        logs.sort(key=lambda pair: _sort_key(*pair))
        return Listing(logs, problems)

    async def part(self, run: str, wanted: ReadLog, node: str | None = None) -> LogText:
        """Return a part of a log from `node`; None: from the node of the rank.

        Raises:
            UnknownRunError: no such run.
            InvalidRequestError: the run has no such node, or several nodes have a launcher's log.
            ConflictError: the node has no agent that can answer.
            ProblemError: there is no such log, or the node has not answered in time.
        """
        known = await run_in_threadpool(
            holders, self.store, run, None if node else wanted.rank, wanted.attempt
        )
        known = _chosen(known, wanted, node)
        answers = await ask(self.store, self._asker, known, run, wanted)
        parts = [
            (holder.node, answer)
            for holder, answer in zip(known, answers, strict=True)
            if isinstance(answer, LogPart)
        ]
        if parts:
            return _as_text(*max(parts, key=lambda pair: pair[1].attempt or 0))
        if any(isinstance(answer, Exception) for answer in answers):
            raise refusal(answers)
        words = missing(known, answers) or f"run {run} has no logs: no node has started it"
        raise ProblemError(HTTPStatus.NOT_FOUND, words)


def _chosen(known: Sequence[LogHolder], wanted: ReadLog, node: str | None) -> list[LogHolder]:
    names = ", ".join(holder.node for holder in known) or "none"
    if node is not None:
        if chosen := [holder for holder in known if holder.node == node]:
            return chosen
        raise InvalidRequestError("node", f"{node} is not a node of the run; its nodes: {names}")
    if wanted.rank is None and len(known) > 1:
        raise InvalidRequestError("node", f"each node has a launcher's log: give one of {names}")
    return list(known)


def _sort_key(node: str, log: LogFile) -> tuple[bool, int, int, bool, str]:
    rank, attempt = log.rank, log.attempt
    return rank is not None, attempt or 0, rank or 0, log.output == "stderr", node


def _as_text(node: str, part: LogPart) -> LogText:
    """Decode a part, without an incomplete character at its end if more bytes may follow."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    final = part.offset + len(part.data) >= part.size and not part.may_grow
    text = decoder.decode(part.data, final)
    kept = len(part.data) - (0 if final else len(decoder.getstate()[0]))
    following = part.offset + kept
    return LogText(node, part.attempt, part.offset, following, part.size, part.may_grow, text)


class Follow:
    """Stream of the events of a growing log, from the position in `wanted` on.

    `node` is the node that has the log; None: the node of the rank. `closing` returns whether the
    server shuts down, and `allowed` whether the client may still read.
    """

    def __init__(
        self,
        logs: Logs,
        run: str,
        wanted: ReadLog,
        node: str | None,
        closing: Callable[[], bool],
        allowed: Callable[[], Awaitable[bool]],
    ) -> None:
        self._logs = logs
        self._run = run
        self._wanted = wanted
        self._node = node
        self._closing = closing
        self._allowed = allowed
        self._problem = ""
        # True if the log has more text after the part that was read last.
        self._more = False
        self._pause_s = _SOON_S

    async def has_ended(self) -> bool:
        """Return whether the run has ended and no text follows the position.

        Raises:
            Exception: any error of `Logs.part`. While the run is active, however, a missing log is
                no error.
        """
        try:
            part = await self._part()
        except ProblemError as error:
            if error.status is not HTTPStatus.NOT_FOUND or await self._ended():
                raise
            return False
        if part.text or part.may_grow or not await self._ended():
            return False
        return await self._later(part.attempt) is None

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the body of the response."""
        yield b": welcome\n\n"
        sent_at = time.monotonic()
        while not self._closing() and await self._allowed():
            complete, chunk = await self._next_event()
            if not chunk and time.monotonic() - sent_at > COMMENT_S:
                chunk = b": still here\n\n"
            if chunk:
                sent_at = time.monotonic()
                yield chunk
            if complete:
                return
            await self._pause()

    async def _next_event(self) -> tuple[bool, bytes]:
        """Return whether all text was sent, and the next event; empty: there is none yet."""
        try:
            return await self._read_next()
        except UnknownRunError:
            # The run was deleted.
            return True, b""
        except (ProblemError, ConflictError, redis.RedisError, StoreUnavailableError) as error:
            return await self._ended_by_now(), self._problem_event(error)

    async def _read_next(self) -> tuple[bool, bytes]:
        part = await self._part()
        self._problem = ""
        moved = {"attempt": part.attempt, "offset": part.next, "lines": None}
        self._wanted = msgspec.structs.replace(self._wanted, **moved)
        self._more = part.next < part.size and bool(part.text)
        if part.text:
            self._pause_s = _SOON_S
            position = b"%d-%d" % (part.attempt or 0, part.next)
            return False, encoded({"type": "text", **self._shown(part)}, position)
        if part.may_grow:
            return False, b""
        # Check whether the run has ended before the logs are listed: an ended run gets no further
        # attempt, so the list then contains the last one.
        ended = await self._ended()
        later = await self._later(part.attempt)
        if later is None:
            return ended, b""
        self._wanted = msgspec.structs.replace(self._wanted, attempt=later, offset=0)
        self._more = True
        return False, b""

    async def _part(self) -> LogText:
        part = await self._logs.part(self._run, self._wanted, self._node)
        # If the log is shorter than the position, it was replaced: read the new log from its start.
        if 0 < self._wanted.offset > part.size:
            self._wanted = msgspec.structs.replace(self._wanted, offset=0)
            return await self._logs.part(self._run, self._wanted, self._node)
        return part

    async def _later(self, attempt: int | None) -> int | None:
        if attempt is None:
            return None
        listing = await self._logs.listing(self._run, attempt + 1)
        kind = (self._wanted.rank, self._wanted.output)
        later = (log for _, log in listing.logs if (log.rank, log.output) == kind)
        return min((log.attempt for log in later if log.attempt is not None), default=None)

    async def _ended(self) -> bool:
        row = await run_in_threadpool(runs.get, self._logs.store, self._run)
        return row["state"] in ENDED

    async def _ended_by_now(self) -> bool:
        try:
            return await self._ended()
        except UnknownRunError:
            return True
        except StoreUnavailableError:
            return False

    def _shown(self, part: LogText) -> dict[str, Any]:
        of_rank = self._wanted.rank is not None
        output = self._wanted.output if of_rank else None
        return {"rank": self._wanted.rank, "output": output, **asdict(part)}

    def _problem_event(self, error: Exception) -> bytes:
        if isinstance(error, ProblemError) and error.status is HTTPStatus.NOT_FOUND:
            return b""
        before, self._problem = self._problem, str(error)
        return (
            b"" if before == self._problem else encoded({"type": "problem", "detail": str(error)})
        )

    async def _pause(self) -> None:
        if self._more:
            self._more = False
            return
        until = time.monotonic() + self._pause_s
        self._pause_s = min(1.5 * self._pause_s, _LATER_S)
        while not self._closing() and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, SHUTDOWN_CHECK_S))


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
        int,
        Query(ge=0, le=_MOST_LOG_ATTEMPT, description="list only logs of this and later attempts"),
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
        "logs": [{"node": node, **msgspec.structs.asdict(log)} for node, log in listing.logs],
    }


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
        204: {"description": "The run has ended, and no text follows the requested position."},
    },
)
async def follow_log(
    request: Request,
    run: str,
    wanted: Wanted,
    node: Node = None,
    last_event_id: Annotated[str | None, Header(pattern=_POSITION, max_length=26)] = None,
) -> Response:
    """Stream the text of a log while it grows, and then the text of the next attempts' logs.

    The stream ends when the run has ended and all text was sent. It also ends when the client's
    token is revoked or has expired. The header `Last-Event-ID` resumes a stream, and takes
    precedence over `attempt`, `offset` and `tail`.
    """
    if last_event_id is not None:
        attempt, offset = map(int, last_event_id.split("-"))
        wanted = ReadLog(wanted.rank, wanted.output, attempt, offset, wanted.limit)
    state = request.app.state
    allowed = partial(state.rights.valid, identity_of(request).token)
    followed = Follow(_logs(request), run, wanted, node, state.closing, allowed)
    if await followed.has_ended():
        return Response(status_code=HTTPStatus.NO_CONTENT)
    return EventStream(followed.stream(), state.streams)
