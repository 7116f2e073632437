"""Limit on the number of event streams per client."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http import HTTPStatus

from starlette.requests import HTTPConnection
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline_backend.api.errors import problem_response
from paceline_backend.api.identity import identity_of
from paceline_backend.api.limits import network_of

# A closed page frees its stream after about this time.
_RETRY_S = 5  # seconds

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
        """Count a stream until the block ends. Yield False if the client has too many."""
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
        refusal.headers["Retry-After"] = str(_RETRY_S)
        await refusal(scope, receive, send)


def _client(scope: Scope) -> Client:
    connection = HTTPConnection(scope)
    address = connection.client.host if connection.client else ""
    return identity_of(connection).name, network_of(address)
