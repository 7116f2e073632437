"""User names and client addresses that trusted proxies in front of the server send."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from paceline_backend.server.settings import Proxies
from paceline_backend.store.audit import RESERVED
from paceline_backend.store.tokens import Holder

_USER = "proxy_user"
_DEFAULT = "viewer"


class ProxyIdentity:
    """ASGI middleware that accepts the user and the client address from trusted proxies.

    Uvicorn can set the client address, too, but would trust every user of this machine. Therefore,
    this feature of Uvicorn is turned off, and the middleware sets the address for requests from
    trusted proxies only.
    """

    def __init__(self, app: ASGIApp, proxies: Proxies) -> None:
        self.app = app
        self.proxies = proxies
        # The ASGI types of Uvicorn differ from the types of Starlette.
        self._addressed = ProxyHeadersMiddleware(app, list(proxies.trusted))  # type: ignore[arg-type]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the user in the state of the request, and pass the request on."""
        peer = scope["client"][0] if scope.get("client") else ""
        if scope["type"] == "lifespan" or not self.proxies.trusts(peer):
            await self.app(scope, receive, send)
            return
        header = self.proxies.header
        names = Headers(scope=scope).getlist(header) if header is not None else []
        # If the header is repeated, the client has sent it, too, so no value is trusted.
        if len(names) == 1 and names[0] and names[0] not in RESERVED:
            role = self.proxies.roles.get(names[0], _DEFAULT)
            # The settings have validated the role, so its type is correct.
            holder = Holder("", names[0], role)  # type: ignore[arg-type]
            scope.setdefault("state", {})[_USER] = holder
        await self._addressed(scope, receive, send)  # type: ignore[arg-type]


def user_of(scope: Scope) -> Holder | None:
    """Return the user whom a trusted proxy has named; None: no trusted proxy has named a user."""
    holder = scope.get("state", {}).get(_USER)
    return holder if isinstance(holder, Holder) else None
