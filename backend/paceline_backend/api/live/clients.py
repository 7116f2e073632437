"""How many event streams a client may have."""

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

_RETRY_S = 5  # a page that was closed frees its stream about as fast

Client = tuple[str, str]  # who asks, and the network that the request came from


class Streams:
    """Counts the open event streams of each client.

    Args:
        most: streams that a client may have.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.refused = 0
        self._open: Counter[Client] = Counter()

    @property
    def total(self) -> int:
        """Open streams of all clients."""
        return self._open.total()

    @contextmanager
    def opened(self, client: Client) -> Iterator[bool]:
        """Counts a stream until the block ends; whether the client may have it."""
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
    """Server-sent events, or 429 for a client that has too many streams already."""

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], streams: Streams) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, headers=headers)
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
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
