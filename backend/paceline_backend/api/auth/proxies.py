"""What proxies in front of the server say about a client, where they are trusted."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from paceline_backend.server.settings import Proxies
from paceline_backend.store.access.tokens import Holder
from paceline_backend.store.audit import RESERVED

_USER = "proxy_user"  # in a request's state
_DEFAULT = "viewer"


class ProxyIdentity:
    """ASGI middleware that takes trusted proxies' word for who and where a client is.

    Uvicorn does the latter by itself, but trusts this machine's users: so it is turned off there,
    and done here for the same proxies.

    Args:
        app: what gets the requests.
        proxies: whom to trust.
    """

    def __init__(self, app: ASGIApp, proxies: Proxies) -> None:
        self.app = app
        self.proxies = proxies
        # Uvicorn's types of ASGI are not Starlette's.
        self._addressed = ProxyHeadersMiddleware(app, list(proxies.trusted))  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Notes the user; passes everything on, with the client's own address."""
        peer = scope["client"][0] if scope.get("client") else ""
        if scope["type"] == "lifespan" or not self.proxies.trusts(peer):
            await self.app(scope, receive, send)
            return
        header = self.proxies.header
        names = Headers(scope=scope).getlist(header) if header is not None else []
        # Several: the client has sent one, too.
        if len(names) == 1 and names[0] and names[0] not in RESERVED:
            role = self.proxies.roles.get(names[0], _DEFAULT)
            holder = Holder("", names[0], role)  # type: ignore[arg-type]  # settings checks roles
            scope.setdefault("state", {})[_USER] = holder
        await self._addressed(scope, receive, send)  # type: ignore[arg-type]


def user_of(scope: Scope) -> Holder | None:
    """The user whom a trusted proxy has named."""
    holder = scope.get("state", {}).get(_USER)
    return holder if isinstance(holder, Holder) else None
