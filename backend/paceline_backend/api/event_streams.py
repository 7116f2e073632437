"""Common parts of event streams: their format, the limit per client, and the check of the token.

A route returns an `EventStream`, which refuses a client that has too many streams open (`Streams`).
A stream may last for hours, so the client's token may expire or be revoked meanwhile. The generator
of the events therefore calls `Rights.valid` from time to time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline_backend.api.auth.failures import network_of
from paceline_backend.api.errors import problem_response
from paceline_backend.api.identity import identity_of
from paceline_backend.store import StoreError

# Maximum time for which a stream continues after the client's token was revoked or has expired.
CHECK_S = 2.0  # seconds
# `Rights` forgets the result of a token that no stream has checked for this time.
_RIGHTS_KEPT_S = 60.0  # seconds

# Interval of comments in a stream without events, because proxies close silent connections.
COMMENT_S = 10.0  # seconds
SHUTDOWN_CHECK_S = 0.5  # seconds
# Value of `Retry-After`. The stream of a closed page no longer counts after about this time.
_RETRY_AFTER_S = 5  # seconds

log = logging.getLogger(__name__)

# Name of the caller, and the network of its address.
Client = tuple[str, str]


class Streams:
    """Counter of the open event streams of each client, at most `most` per client."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.refused = 0
        self._open: Counter[Client] = Counter()

    @property
    def total(self) -> int:
        """Number of open streams of all clients."""
        return self._open.total()

    @contextmanager
    def opened(self, client: Client) -> Iterator[bool]:
        """Count a stream during a `with` block. Yield False if the client already has too many."""
        if self._open[client] >= self.most:
            self.refused += 1
            yield False
            return
        self._open[client] += 1
        try:
            yield True
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


class EventStream(StreamingResponse):
    """Response of server-sent events, or 429 for a client that already has too many streams."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], streams: Streams) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers)
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, or a refusal."""
        with self.streams.opened(_client(scope)) as allowed:
            if allowed:
                await super().__call__(scope, receive, send)
                return
        refusal = problem_response(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"this client has {self.streams.most:,} event streams already: close some of them; "
            "paceline server --max-streams sets this limit",
        )
        refusal.headers["Retry-After"] = str(_RETRY_AFTER_S)
        await refusal(scope, receive, send)


def encoded(event: dict[str, Any], position: bytes = b"") -> bytes:
    """Encode an event. `position` is the ID with which a client resumes the stream."""
    number = b"id: %s\n" % position if position else b""
    return b"event: message\n%sdata: %s\n\n" % (number, orjson.dumps(event))


def _client(scope: Scope) -> Client:
    connection = HTTPConnection(scope)
    address = connection.client.host if connection.client else ""
    return identity_of(connection).name, network_of(address)


@dataclass
class _TokenCheck:
    # Time of the last check, by the event loop's clock.
    at: float
    # True until the first check, because the guard has just checked the token of a new stream.
    valid: bool = True


class Rights:
    """Check of the tokens of open streams, once per token every `CHECK_S` seconds.

    `holds` is called in a thread, and returns whether the token with an ID is still valid.
    """

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self._answers: dict[str, _TokenCheck] = {}

    async def valid(self, token: str) -> bool:
        """Return whether a token is still valid; without the database, return the last result."""
        now = asyncio.get_running_loop().time()
        known = self._answers.get(token)
        if known is not None and now < known.at + CHECK_S:
            return known.valid
        known = self._answers[token] = known or _TokenCheck(now)
        # Set the time before the call, so that other streams do not repeat the check meanwhile.
        known.at = now
        try:
            known.valid = await run_in_threadpool(self._holds, token)
        except StoreError as error:
            log.debug("cannot check whether a token is still valid: %s", error)
        self._answers = {t: a for t, a in self._answers.items() if a.at + _RIGHTS_KEPT_S > now}
        return known.valid
