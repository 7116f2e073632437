"""One client's stream of what is added to a log, over all attempts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from http import HTTPStatus
from typing import Any

import msgspec
import orjson
import redis
from starlette.concurrency import run_in_threadpool

from paceline.wire import ENDED
from paceline.wire.asking import ReadLog
from paceline_backend.api.errors import ProblemError
from paceline_backend.api.logs.reading import Logs, LogText
from paceline_backend.requests import ConflictError
from paceline_backend.store import StoreUnavailableError, runs
from paceline_backend.store.runs import UnknownRunError

_SOON_S, _LATER_S = 0.5, 2.0  # between looks at a log that has grown, and at one that has not
_STEP_S = 0.5  # how long a closing server may go unnoticed
_COMMENT_S = 10.0  # proxies close what is silent for longer


class Follow:
    """Events of a log that grows.

    Args:
        logs: where to read.
        run: the run's id.
        wanted: the log, and the position to begin at.
        node: that has the log; None: the one that has the rank.
        closing: whether the server is about to end.
        allowed: whether the client may still read.
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
        self._problem = ""  # that the client was told last
        self._more = False  # is there already
        self._pause_s = _SOON_S

    async def over(self) -> bool:
        """Whether the run has ended and nothing comes after the position.

        Raises:
            ProblemError, ConflictError, redis.RedisError, StoreError: as `Logs.part`; but the log
                of a run that has not ended may come later.
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
        """The body of the answer."""
        yield b": welcome\n\n"
        spoke = time.monotonic()
        while not self._closing() and await self._allowed():
            over, chunk = await self._look()
            if not chunk and time.monotonic() - spoke > _COMMENT_S:
                chunk = b": still here\n\n"
            if chunk:
                spoke = time.monotonic()
                yield chunk
            if over:
                return
            await self._rest()

    async def _look(self) -> tuple[bool, bytes]:
        """Whether nothing comes any more, and the next event if there is one."""
        try:
            return await self._news()
        except UnknownRunError:  # it was deleted
            return True, b""
        except (ProblemError, ConflictError, redis.RedisError, StoreUnavailableError) as error:
            return await self._ended_by_now(), self._trouble(error)

    async def _news(self) -> tuple[bool, bytes]:
        part = await self._part()
        self._problem = ""
        moved = {"attempt": part.attempt, "offset": part.next, "lines": None}
        self._wanted = msgspec.structs.replace(self._wanted, **moved)
        self._more = part.next < part.size and bool(part.text)
        if part.text:
            self._pause_s = _SOON_S
            position = b"%d-%d" % (part.attempt or 0, part.next)
            return False, _event({"type": "text", **self._shown(part)}, position)
        if part.may_grow:
            return False, b""
        ended = await self._ended()  # first: what is there by then is all
        later = await self._later(part.attempt)
        if later is None:
            return ended, b""
        self._wanted = msgspec.structs.replace(self._wanted, attempt=later, offset=0)
        self._more = True
        return False, b""

    async def _part(self) -> LogText:
        part = await self._logs.part(self._run, self._wanted, self._node)
        if 0 < self._wanted.offset > part.size:  # another log is in its place
            self._wanted = msgspec.structs.replace(self._wanted, offset=0)
            return await self._logs.part(self._run, self._wanted, self._node)
        return part

    async def _later(self, attempt: int | None) -> int | None:
        """The next attempt in which there is such a log."""
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
        """The same, while the database may be away."""
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

    def _trouble(self, error: Exception) -> bytes:
        """Why nothing comes, once; a log that is not there yet is no trouble."""
        if isinstance(error, ProblemError) and error.status is HTTPStatus.NOT_FOUND:
            return b""
        words, self._problem = self._problem, str(error)
        return b"" if words == self._problem else _event({"type": "problem", "detail": str(error)})

    async def _rest(self) -> None:
        """Waits, the longer the longer nothing has come; not if there is more already."""
        if self._more:
            self._more = False
            return
        until = time.monotonic() + self._pause_s
        self._pause_s = min(1.5 * self._pause_s, _LATER_S)
        while not self._closing() and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _STEP_S))


def _event(content: dict[str, Any], position: bytes = b"") -> bytes:
    """A server-sent event; a client that has it goes on at the position."""
    number = b"id: %s\n" % position if position else b""
    return b"event: message\n%sdata: %s\n\n" % (number, orjson.dumps(content))
