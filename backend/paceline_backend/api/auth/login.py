"""Login of a browser with a token or a one-time link, and its logout.

Public methods raise `StoreError` while the database is unavailable.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates

from paceline_backend.api.auth.credentials import COOKIE, CredentialCheck
from paceline_backend.api.auth.failures import LoginThrottle
from paceline_backend.api.errors import problem_response
from paceline_backend.store.tokens import BROWSER_S, Holder

PATH = "/login"
LOGOUT = "/logout"
_MOST_FORM_BYTES = 8192

_templates = Jinja2Templates(Path(__file__).parents[1] / "templates")


class Login:
    """Request handler of `/login` and `/logout`."""

    def __init__(self, credentials: CredentialCheck, throttle: LoginThrottle) -> None:
        self.credentials = credentials
        self.throttle = throttle

    async def __call__(self, request: Request) -> Response:
        """Return the login page, or log the browser in and redirect it."""
        target = request.query_params.get("next", "/")
        code = request.query_params.get("code")
        if request.method == "GET" and code is not None:
            return await self._by_link(request, code, _local(target))
        if request.method != "POST":
            return _page(request, _local(target))
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_FORM_BYTES:
                return problem_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "token: too long")
        form = parse_qs(body.decode(errors="replace"))
        token = form.get("token", [""])[0].strip()
        return await self._by_token(request, token, _local(form.get("next", ["/"])[0]))

    async def leave(self, request: Request) -> Response:
        """Log out the browser that sends this request, and redirect it to the login page."""
        if request.method != "POST":
            message = "send a POST to log out"
            refused = problem_response(HTTPStatus.METHOD_NOT_ALLOWED, message)
            refused.headers["Allow"] = "POST"
            return refused
        cookie = request.cookies.get(COOKIE)
        if cookie is not None:
            browser = await run_in_threadpool(self.credentials.of_cookie, cookie)
            if browser is not None:
                await run_in_threadpool(self.credentials.leave, browser, _address(request))
        response = RedirectResponse(PATH, HTTPStatus.SEE_OTHER)
        response.delete_cookie(COOKIE, path=_cookie_path(request), httponly=True)
        return response

    async def _by_token(self, request: Request, token: str, target: str) -> Response:
        address = _address(request)
        wait_s = self._counted(address)
        check = self.credentials.of_token
        holder = await run_in_threadpool(check, token.encode(), throttled=wait_s > 0)
        if holder is None:
            if wait_s:
                return _busy(request, target, wait_s)
            await self._failed(address, None, "login page", "unknown token")
            message = "That is not a token of this server."
            return _page(request, target, message, HTTPStatus.UNAUTHORIZED)
        problem, status = str(holder.refused), HTTPStatus.UNAUTHORIZED
        if not problem and holder.scope == "agent":
            problem, status = "for agents only", HTTPStatus.FORBIDDEN
        if problem:
            if not wait_s:
                await self._failed(address, holder, "login page", f"the token is {problem}")
            return _page(request, target, f"The token {holder.name} is {problem}.", status)
        if not wait_s:
            # Undo the count first: the token was right, even if the database fails now.
            self.throttle.right(address)
        cookie = await run_in_threadpool(self.credentials.enter, holder, address)
        return _entered(request, cookie, target)

    async def _by_link(self, request: Request, code: str, target: str) -> Response:
        address = _address(request)
        wait_s = self._counted(address)
        cookie = await run_in_threadpool(self.credentials.enter_by_link, code, address)
        if cookie is None:
            if wait_s:
                return _busy(request, target, wait_s)
            await self._failed(address, None, "link", "unknown, used or expired link")
            message = "This link was already used or has expired. `paceline open` prints another."
            return _page(request, target, message, HTTPStatus.UNAUTHORIZED)
        if not wait_s:
            self.throttle.right(address)
        return _entered(request, cookie, target)

    def _counted(self, address: str) -> int:
        """Count the attempt as failed before it is checked, so that parallel attempts are limited.

        If the address must wait, return the seconds, and do not count the attempt. Otherwise count
        it and return 0. If the token is right and too long to be guessed, callers ignore the wait,
        because the token's owner may share the address with an attacker.
        """
        wait_s = self.throttle.wait_s(address)
        if not wait_s:
            self.throttle.wrong(address)
        return wait_s

    async def _failed(self, address: str, holder: Holder | None, way: str, reason: str) -> None:
        record = self.credentials.failures.record
        await run_in_threadpool(record, address, holder, way, reason)


def _busy(request: Request, target: str, wait_s: int) -> Response:
    message = f"Too many wrong tokens. Try again in {wait_s} s."
    busy = _page(request, target, message, HTTPStatus.TOO_MANY_REQUESTS)
    busy.headers["Retry-After"] = str(wait_s)
    return busy


def _entered(request: Request, cookie: str, target: str) -> Response:
    response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
    response.set_cookie(
        COOKIE,
        cookie,
        httponly=True,
        samesite="lax",
        secure=request.url.scheme == "https",
        max_age=int(BROWSER_S),
        path=_cookie_path(request),
    )
    return response


def _cookie_path(request: Request) -> str:
    return str(request.scope.get("path_prefix") or "/")


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _page(
    request: Request, target: str, message: str = "", status: HTTPStatus = HTTPStatus.OK
) -> Response:
    context = {"next": target, "message": message}
    return _templates.TemplateResponse(request, "login.html", context, status)


def _local(target: str) -> str:
    """Return the target if it is a path of this server, else `/`: never redirect to other sites."""
    safe = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if safe and "\n" not in target and "\r" not in target else "/"
