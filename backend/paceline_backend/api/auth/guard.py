"""Guard in front of all routes: identify the caller, then check the caller's role."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline_backend.api.auth import login, proxies
from paceline_backend.api.auth.credentials import COOKIE, CredentialCheck
from paceline_backend.api.auth.failures import LoginThrottle
from paceline_backend.api.errors import forbidden, problem_response
from paceline_backend.api.identity import Identity
from paceline_backend.api.rules import ANYBODY, SAFE_METHODS, Allow
from paceline_backend.store import StoreError
from paceline_backend.store.tokens import Holder

log = logging.getLogger(__name__)

_AWAY = HTTPStatus.SERVICE_UNAVAILABLE


class Authentication:
    """ASGI middleware in front of all routes and WebSockets.

    A request needs a token, the cookie that `/login` sets, or a trusted proxy that names its user.
    Requests from the server's own machine are no exception. A browser also sends the cookie with
    requests that a page of another site makes. The guard recognises such requests by their `Origin`
    header, and refuses those that change something.

    `rules` returns the rule of a request's route. `throttle` limits wrong logins, and `bearers`
    limits wrong tokens in requests. The two limits are separate, so that a client with an outdated
    token does not block logins from its address.
    """

    def __init__(
        self,
        app: ASGIApp,
        credentials: CredentialCheck,
        rules: Callable[[Scope], Allow | None],
        throttle: LoginThrottle | None = None,
        bearers: LoginThrottle | None = None,
    ) -> None:
        self.app = app
        self.credentials = credentials
        self.rules = rules
        self.bearers = bearers or LoginThrottle()
        self.login = login.Login(credentials, throttle or LoginThrottle())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an allowed request on; answer any other request with a refusal."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        try:
            answer = await self._answer(scope, receive)
        except StoreError as error:
            # Do not put the error into the response, because the client is not authenticated.
            log.warning("cannot authenticate the request: %s", error)
            answer = problem_response(_AWAY, "the database does not answer: try again later")
        if isinstance(answer, Response):
            await _refuse(answer, scope, receive, send)
            return
        await self.app(scope, receive, send)
        if answer is not None:
            await run_in_threadpool(self.credentials.touch, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> Response | Holder | None:
        """Return the caller of a request that is passed on; None: its route is public.

        If the request is not passed on, return the response to it: a refusal, or a response of
        `Login`.
        """
        if scope["type"] == "http":
            if scope["path"] == login.PATH:
                return await self.login(Request(scope, receive))
            if scope["path"] == login.LOGOUT:
                refusal = _from_elsewhere(scope, Headers(scope=scope))
                return refusal or await self.login.leave(Request(scope, receive))
        rule = self.rules(scope)
        if rule == ANYBODY:
            return None
        holder = await self._holder(scope)
        if isinstance(holder, Response):
            return holder
        address = _address(scope)
        rights = {"node": holder.node, "run": holder.run}
        identity = Identity(holder.name, holder.scope, address, holder.id, **rights)
        if rule is None:
            message = "no role may send this request: the route has no access rule"
            return problem_response(HTTPStatus.FORBIDDEN, message)
        if not rule.admits(identity):
            return problem_response(*forbidden(rule.least, identity.scope))
        scope.setdefault("state", {})["identity"] = identity
        return holder

    async def _holder(self, scope: Scope) -> Holder | Response:
        headers = Headers(scope=scope)
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return await self._bearer(scope, token.strip().encode("latin-1"))
        cookie = HTTPConnection(scope).cookies.get(COOKIE)
        holder = None
        if cookie is not None:
            holder = await run_in_threadpool(self.credentials.of_cookie, cookie)
        holder = holder or proxies.user_of(scope)
        if holder is None:
            return _unknown(scope, headers)
        # A browser also sends the cookie with requests of pages from other ports of this host.
        return _from_elsewhere(scope, headers) or holder

    async def _bearer(self, scope: Scope, token: bytes) -> Holder | Response:
        address = _address(scope)
        wait_s = self.bearers.wait_s(address)
        check = self.credentials.of_token
        holder = await run_in_threadpool(check, token, throttled=wait_s > 0)
        if holder is not None and not holder.refused:
            return holder
        record = self.credentials.failures.record_request
        if holder is not None:
            await run_in_threadpool(record, address, holder, f"the token is {holder.refused}")
            return _unauthorised(f"the token {holder.name} is {holder.refused}")
        await run_in_threadpool(record, address, None, "unknown token")
        if wait_s:
            message = f"too many wrong tokens came from this address: try again in {wait_s} s"
            busy = problem_response(HTTPStatus.TOO_MANY_REQUESTS, message)
            busy.headers["Retry-After"] = str(wait_s)
            return busy
        self.bearers.wrong(address)
        return _unknown(scope, Headers(scope=scope))


async def _refuse(answer: Response, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 4401, "reason": "not allowed"})
    else:
        await answer(scope, receive, send)


def _unknown(scope: Scope, headers: Headers) -> Response:
    wants_page = scope.get("method") == "GET" and "text/html" in headers.get("accept", "")
    if wants_page and not scope["path"].startswith("/api/"):
        query = scope["query_string"].decode("latin-1")
        back = scope["path"] + (f"?{query}" if query else "")
        return RedirectResponse(f"{login.PATH}?next={quote(back, safe='')}", HTTPStatus.SEE_OTHER)
    return _unauthorised(
        "send a token of this server as `Authorization: Bearer …`, or log in at /login"
    )


def _unauthorised(message: str) -> Response:
    response = problem_response(HTTPStatus.UNAUTHORIZED, message)
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _from_elsewhere(scope: Scope, headers: Headers) -> Response | None:
    """Return a refusal if a page of another origin has sent a request that changes something."""
    host, origin = headers.get("host", ""), headers.get("origin")
    changes = scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS
    if changes and origin is not None and origin.partition("://")[2] != host:
        return problem_response(
            HTTPStatus.FORBIDDEN,
            f"a page of {origin} may not send requests to {host}: send the token as "
            "`Authorization: Bearer …`",
        )
    return None


def _address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""
