"""Security headers, which restrict what a browser may do with a response."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DOCS = "/docs"


class SecurityHeaders:
    """ASGI middleware that adds the security headers to each response.

    A package that mounts pages adds the hashes of its inline scripts to
    `app.state.script_hashes`, as `'sha256-…'`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Add the security headers to the response."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(security_headers(scope))
            await send(message)

        await self.app(scope, receive, sending)


def security_headers(scope: Scope) -> dict[str, str]:
    """Return the security headers for the response to a request."""
    hashes: list[str] = getattr(scope["app"].state, "script_hashes", [])
    # FastAPI writes an inline script into the Swagger page. Inline scripts are safe there, because
    # the page shows no data that a client sent.
    inline = ["'unsafe-inline'"] if scope["path"].startswith(_DOCS) else hashes
    directives = {
        "default-src": ["'none'"],
        "script-src": ["'self'", *inline],
        # Mantine, AG Grid and Plotly write style elements, and the login page has one.
        "style-src": ["'self'", "'unsafe-inline'"],
        # The styles of AG Grid and Mantine contain icons as data URLs.
        "img-src": ["'self'", "data:"],
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
    }
    policy = "; ".join(f"{name} {' '.join(values)}" for name, values in directives.items())
    return {
        "Content-Security-Policy": policy,
        # For browsers that do not support `frame-ancestors`.
        "X-Frame-Options": "DENY",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
    }
