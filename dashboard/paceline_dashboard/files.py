"""The dashboard's files, compressed once for each process instead of at each request."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PLACES = ("/assets/", "/_dash-component-suites/")
_MOST = 1024  # files that are kept, about ten times what the dashboard has
_DEPENDS = ("if-none-match", "if-modified-since", "range")  # the answer depends on these


class KeptFiles:
    """ASGI middleware: keeps the answers for files, which stay the same while the process lives.

    To compress all files of a page takes a second of CPU time. Meanwhile no other client would be
    served.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._answers: dict[tuple[str, bool], list[Message]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers from memory, or lets the application answer."""
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
    """A message whose headers other middleware may change."""
    if "headers" in message:
        return {**message, "headers": list(message["headers"])}
    return message
