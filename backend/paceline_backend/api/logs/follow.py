"""Stream of the text that is added to a log, over all attempts, for one client."""

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

# Pause before the next read of a log that has grown, and maximum pause for one that has not.
_SOON_S, _LATER_S = 0.5, 2.0  # seconds
# Interval at which a stream checks whether the server shuts down.
_STEP_S = 0.5  # seconds
# Proxies close connections that are silent for longer.
_COMMENT_S = 10.0  # seconds


class Follow:
    """Events of a growing log, from the position in `wanted` on.

    `node` is None for the node of the rank. `closing` returns whether the server shuts down,
    `allowed` whether the client may still read.
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
        # The problem that was last reported to the client.
        self._problem = ""
        # The log has more text after the last part.
        self._more = False
        self._pause_s = _SOON_S

    async def over(self) -> bool:
        """Return whether the run has ended and nothing comes after the position.

        It raises the errors of `Logs.part`, except that a missing log is no error before the run
        has ended.
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
        """Return whether the log is complete, and the next event if there is one."""
        try:
            return await self._news()
        except UnknownRunError:
            # The run was deleted.
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
        # Check this before listing the logs: after the end, no attempt is added to the list.
        ended = await self._ended()
        later = await self._later(part.attempt)
        if later is None:
            return ended, b""
        self._wanted = msgspec.structs.replace(self._wanted, attempt=later, offset=0)
        self._more = True
        return False, b""

    async def _part(self) -> LogText:
        part = await self._logs.part(self._run, self._wanted, self._node)
        # A log below its previous size was replaced by another one: read it from its start.
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

    def _trouble(self, error: Exception) -> bytes:
        """Return an event that reports a problem, once. A log that does not exist yet is none."""
        if isinstance(error, ProblemError) and error.status is HTTPStatus.NOT_FOUND:
            return b""
        words, self._problem = self._problem, str(error)
        return b"" if words == self._problem else _event({"type": "problem", "detail": str(error)})

    async def _rest(self) -> None:
        """Pause, longer the longer the log has not grown. Return at once if it has more text."""
        if self._more:
            self._more = False
            return
        until = time.monotonic() + self._pause_s
        self._pause_s = min(1.5 * self._pause_s, _LATER_S)
        while not self._closing() and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _STEP_S))


def _event(content: dict[str, Any], position: bytes = b"") -> bytes:
    number = b"id: %s\n" % position if position else b""
    return b"event: message\n%sdata: %s\n\n" % (number, orjson.dumps(content))
