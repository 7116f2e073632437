"""How much of a request the server reads."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_backend.api.errors import problem_response

_TOO_LARGE = HTTPStatus.REQUEST_ENTITY_TOO_LARGE


class BodyLimit:
    """ASGI middleware that answers 413 to a body of more than `limit` bytes, without reading it.

    Not FastAPI's `max_body_size`: if no route reads the body, its answer is no problem document,
    and Dash turns the error that it raises into a 500.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is small enough."""
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
            # What the application makes of the exception is left out, in favour of the refusal.
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
