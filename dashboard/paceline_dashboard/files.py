"""Cache of the dashboard's compressed files, so that a process compresses each file only once."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PLACES = ("/assets/", "/_dash-component-suites/")
# Maximum number of cached files, about ten times the number of files of the dashboard.
_MOST = 1024
# Requests with one of these headers are not cached, because the answer depends on it.
_DEPENDS = ("if-none-match", "if-modified-since", "range")


class KeptFiles:
    """ASGI middleware that caches answers for files, which do not change while the process runs.

    Compressing all files of a page takes a second of CPU time, in which no other client is served.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._answers: dict[tuple[str, bool], list[Message]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from the cache, or call the application."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (
            scope["type"] != "http"
            or scope["method"] != "GET"
            or not any(place in scope["path"] for place in _PLACES)
            or any(name in headers for name in _DEPENDS)
        ):
            await self.app(scope, receive, send)
            return
        key = (scope["path"], "gzip" in headers.get("accept-encoding", ""))
        if key in self._answers:
            for message in self._answers[key]:
                await send(_copy(message))
            return
        answer: list[Message] = []

        async def keeping(message: Message) -> None:
            answer.append(_copy(message))
            await send(message)

        await self.app(scope, receive, keeping)
        if answer and answer[0].get("status") == 200 and len(self._answers) < _MOST:
            self._answers[key] = answer


def _copy(message: Message) -> Message:
    """Copy a message, because other middleware may change its headers."""
    if "headers" in message:
        return {**message, "headers": list(message["headers"])}
    return message
