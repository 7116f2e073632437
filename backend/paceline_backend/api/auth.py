"""Who may talk to the server: tokens, and without them only pages of this machine."""

from __future__ import annotations

import hmac
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import Security
from fastapi.security import APIKeyCookie, HTTPBearer
from itsdangerous import BadData, URLSafeTimedSerializer
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline_backend.api.errors import problem_response
from paceline_backend.api.limits import LoginThrottle
from paceline_backend.server.settings import is_loopback

COOKIE = "paceline"
OPEN_PATHS = ("/healthz", "/readyz")
_LOGIN_BYTES = 8192
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")

_KEPT_S = 30 * 24 * 3600  # how long a browser stays logged in
_SALT = "paceline session"
_LOGGED_IN = "logged in"  # what the cookie says, signed with the token

# For OpenAPI only: the guard has checked them before a route is asked.
CREDENTIALS = [
    Security(HTTPBearer(auto_error=False, description="the token of a server that has one")),
    Security(
        APIKeyCookie(name=COOKIE, auto_error=False, description="set by /login, for browsers")
    ),
]

_templates = Jinja2Templates(Path(__file__).parent / "templates")


class Guard:
    """ASGI middleware in front of everything, WebSockets included.

    With a token, a request must bring it, or the cookie that `/login` set. Without one the server
    trusts this machine's user. But a web page from elsewhere, opened in that user's browser, can
    reach loopback too, and has the cookie sent along: it is told by its `Origin` and, where no
    token is wanted, by the name in `Host` (DNS rebinding).

    Args:
        app: what to guard.
        token: that clients must show; None: loopback only.
        throttle: of wrong logins; None: one of its own.
    """

    def __init__(
        self, app: ASGIApp, token: str | None, throttle: LoginThrottle | None = None
    ) -> None:
        self.app = app
        self.token = token
        self.throttle = throttle or LoginThrottle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes on what is allowed; answers the rest."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal: Response | None
        if scope["path"] in OPEN_PATHS:
            refusal = None
        elif self.token is None:
            refusal = _foreign(scope, headers)
        elif scope["path"] == "/login" and scope["type"] == "http":
            await (await self._login(Request(scope, receive), self.token))(scope, receive, send)
            return
        else:
            refusal = _unauthorised(scope, headers, self.token)
        if refusal is None:
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 4401, "reason": "not allowed"})
        else:
            await refusal(scope, receive, send)

    async def _login(self, request: Request, token: str) -> Response:
        target = request.query_params.get("next", "/")
        if request.method != "POST":
            return _page(request, _local(target))
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _LOGIN_BYTES:
                return problem_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "token: too long")
        form = parse_qs(body.decode(errors="replace"))
        target = _local(form.get("next", ["/"])[0])
        address = request.client.host if request.client else ""
        # Nothing is awaited from here on: logins at the same time cannot overtake the count.
        if wait_s := self.throttle.wait_s(address):
            message = f"There were too many wrong tokens. Try again in {wait_s} s."
            busy = _page(request, target, message, HTTPStatus.TOO_MANY_REQUESTS)
            busy.headers["Retry-After"] = str(wait_s)
            return busy
        if not _equal(form.get("token", [""])[0].encode(), token):
            self.throttle.wrong(address)
            return _page(request, target, "That is not the token.", HTTPStatus.UNAUTHORIZED)
        response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        response.set_cookie(
            COOKIE,
            cookie_value(token),
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
            max_age=_KEPT_S,
        )
        return response


def cookie_value(token: str) -> str:
    """What the cookie of a browser that logs in now holds: proof of the token, not the token."""
    return str(_serializer(token).dumps(_LOGGED_IN))


def _serializer(token: str) -> URLSafeTimedSerializer:
    return URLSafeTimedSerializer(token, salt=_SALT)


def _logged_in(scope: Scope, token: str) -> bool:
    """Whether a browser has logged in with this token, and not too long ago."""
    given = HTTPConnection(scope).cookies.get(COOKIE, "")
    try:
        return bool(_serializer(token).loads(given, max_age=_KEPT_S) == _LOGGED_IN)
    except BadData:
        return False


def _page(
    request: Request, target: str, message: str = "", status: HTTPStatus = HTTPStatus.OK
) -> Response:
    """The page to log in, which leads to `target`."""
    context = {"next": target, "message": message}
    return _templates.TemplateResponse(request, "login.html", context, status)


def _unauthorised(scope: Scope, headers: Headers, token: str) -> Response | None:
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        if _equal(given.strip().encode("latin-1"), token):
            return None
    elif _logged_in(scope, token):
        # A browser sends it along for pages of any port of our host.
        return _from_elsewhere(scope, headers, "send the token as `Authorization: Bearer …`")
    wants_page = scope.get("method") == "GET" and "text/html" in headers.get("accept", "")
    if wants_page and not scope["path"].startswith("/api/"):
        query = scope["query_string"].decode("latin-1")
        back = scope["path"] + (f"?{query}" if query else "")
        return RedirectResponse(f"/login?next={quote(back, safe='')}", HTTPStatus.SEE_OTHER)
    response = problem_response(
        HTTPStatus.UNAUTHORIZED,
        "send the server's token as `Authorization: Bearer …`, or log in at /login",
    )
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _foreign(scope: Scope, headers: Headers) -> Response | None:
    host = headers.get("host", "")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        return problem_response(
            HTTPStatus.FORBIDDEN,
            f"without a token this server answers to 127.0.0.1 and localhost only, not to "
            f"{host!r}: start it with --token to reach it by another name",
        )
    return _from_elsewhere(scope, headers, "--token allows it")


def _from_elsewhere(scope: Scope, headers: Headers, remedy: str) -> Response | None:
    """Refuses what a page of another origin makes a browser do, except to read."""
    host, origin = headers.get("host", ""), headers.get("origin")
    changes = scope["type"] == "websocket" or scope["method"] not in _SAFE_METHODS
    if changes and origin is not None and urlsplit(origin).netloc != host:
        return problem_response(
            HTTPStatus.FORBIDDEN,
            f"a page of {origin} may not use this server, which is {host}: {remedy}",
        )
    return None


def _equal(given: bytes, expected: str) -> bool:
    return hmac.compare_digest(given, expected.encode())


def _local(target: str) -> str:
    """A path of this server: a login must not lead elsewhere."""
    parts = urlsplit(target)
    safe = target.startswith("/") and not target.startswith(("//", "/\\")) and not parts.netloc
    return target if safe and "\n" not in target and "\r" not in target else "/"
