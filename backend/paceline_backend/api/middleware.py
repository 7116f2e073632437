"""Small middleware around all requests: path prefix, size of bodies, wake-up of workers."""

from __future__ import annotations

from http import HTTPStatus

import redis
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_backend.api.errors import problem_response
from paceline_backend.api.rules import SAFE_METHODS
from paceline_backend.requests import streams


class PathPrefix:
    """ASGI middleware that removes the path prefix from requests and adds it to redirects.

    `prefix` is the path below which a proxy serves this server. The proxy may also remove the
    prefix from requests itself.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on without the prefix."""
        if not self.prefix or scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                location = headers.get("location", "")
                if location.startswith("/"):
                    headers["location"] = self.prefix + location
            await send(message)

        await self.app(
            {**scope, **self._inner(scope), "path_prefix": self.prefix}, receive, sending
        )

    def _inner(self, scope: Scope) -> dict[str, object]:
        path: str = scope["path"]
        if path != self.prefix and not path.startswith(f"{self.prefix}/"):
            return {}
        inner = path[len(self.prefix) :] or "/"
        return {"path": inner, "raw_path": inner.encode()}


_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BodyLimit:
    """ASGI middleware that responds with 413 to a body of more than `limit` bytes.

    FastAPI's `max_body_size` does not suffice: its response is not a problem document if no route
    reads the body, and in pages of Dash its error becomes a 500.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on unless its body is too large."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif int(Headers(scope=scope).get("content-length", 0)) > self.limit:
            await self._refusal()(scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        size = 0
        started = False

        async def counting() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(_TOO_LARGE)
            return message

        async def sending(message: Message) -> None:
            nonlocal started
            # If the body is too large, drop the application's response: the client gets a 413.
            if started or size <= self.limit:
                started = True
                await send(message)

        try:
            await self.app(scope, counting, sending)
        except HTTPException:
            if size <= self.limit:
                raise
        if size > self.limit and not started:
            await self._refusal()(scope, receive, send)

    def _refusal(self) -> Response:
        return problem_response(
            _TOO_LARGE,
            f"the body has more than {self.limit:,} bytes; "
            "paceline server --max-body-bytes sets this limit",
        )


class WakeWorkers:
    """ASGI middleware that wakes the workers after each request that is not a read.

    The middleware is behind the guard, so only authenticated requests wake workers.
    """

    def __init__(self, app: ASGIApp, bus: redis.Redis) -> None:
        self.app = app
        self.bus = bus

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and wake the workers when it has been answered."""
        try:
            await self.app(scope, receive, send)
        finally:
            # Wake the workers even after a failure: the request may have committed a change before
            # it failed.
            if scope["type"] == "http" and scope["method"] not in SAFE_METHODS:
                await run_in_threadpool(streams.wake, self.bus)
