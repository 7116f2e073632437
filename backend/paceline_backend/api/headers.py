"""Headers that keep a browser from doing with our answers what they are not for."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_DOCS = "/docs"


class SecurityHeaders:
    """ASGI middleware: each answer says what a browser may do with it.

    A package that mounts pages adds the hashes of its inline scripts to
    `app.state.script_hashes`, as `'sha256-…'`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds the headers."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(security_headers(scope))
            await send(message)

        await self.app(scope, receive, sending)


def security_headers(scope: Scope) -> dict[str, str]:
    """The headers of the answer to one request."""
    hashes: list[str] = getattr(scope["app"].state, "script_hashes", [])
    # Swagger's page starts with an inline script that FastAPI writes. The page shows nothing that a
    # client sent.
    inline = ["'unsafe-inline'"] if scope["path"].startswith(_DOCS) else hashes
    directives = {
        "default-src": ["'none'"],
        "script-src": ["'self'", *inline],
        # Mantine, AG Grid and Plotly write style elements, and the page to log in has one.
        "style-src": ["'self'", "'unsafe-inline'"],
        "img-src": ["'self'", "data:"],  # icons in the styles of AG Grid and Mantine
        "font-src": ["'self'"],
        "connect-src": ["'self'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
        "base-uri": ["'none'"],
    }
    policy = "; ".join(f"{name} {' '.join(values)}" for name, values in directives.items())
    return {
        "Content-Security-Policy": policy,
        "X-Frame-Options": "DENY",  # for browsers that do not know frame-ancestors
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "same-origin",
    }
