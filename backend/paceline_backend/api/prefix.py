"""Path prefix below which a reverse proxy serves this server."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class PathPrefix:
    """ASGI middleware that removes the prefix from requests and adds it to redirects.

    It works whether or not the proxy removes the prefix itself.
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
