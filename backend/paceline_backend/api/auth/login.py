"""The page on which a browser logs in: by a token, or by a link that is good once."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.templating import Jinja2Templates

from paceline_backend.api.auth.credentials import COOKIE, Credentials
from paceline_backend.api.errors import problem_response
from paceline_backend.api.limits import LoginThrottle
from paceline_backend.store.access.tokens import BROWSER_S, Holder

PATH = "/login"
_MOST_BYTES = 8192

_templates = Jinja2Templates(Path(__file__).parents[1] / "templates")


class Login:
    """Answers `/login`.

    Args:
        credentials: what is valid.
        throttle: of wrong logins.
    """

    def __init__(self, credentials: Credentials, throttle: LoginThrottle) -> None:
        self.credentials = credentials
        self.throttle = throttle

    async def __call__(self, request: Request) -> Response:
        """The page, or where a browser goes that has logged in.

        Raises:
            StoreError: or one of its kinds.
        """
        target = request.query_params.get("next", "/")
        code = request.query_params.get("code")
        if request.method == "GET" and code is not None:
            return await self._by_link(request, code, _local(target))
        if request.method != "POST":
            return _page(request, _local(target))
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MOST_BYTES:
                return problem_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "token: too long")
        form = parse_qs(body.decode(errors="replace"))
        token = form.get("token", [""])[0].strip()
        return await self._by_token(request, token, _local(form.get("next", ["/"])[0]))

    async def _by_token(self, request: Request, token: str, target: str) -> Response:
        if busy := self._busy(request, target):
            return busy
        holder = await run_in_threadpool(self.credentials.of_token, token.encode())
        if holder is None:
            message = "That is not a token of this server."
            return _page(request, target, message, HTTPStatus.UNAUTHORIZED)
        if holder.refused:
            message = f"The token {holder.name} is {holder.refused}."
            return _page(request, target, message, HTTPStatus.UNAUTHORIZED)
        if holder.scope == "agent":
            message = f"The token {holder.name} is for agents only."
            return _page(request, target, message, HTTPStatus.FORBIDDEN)
        self.throttle.right(_address(request))  # whatever the database says to what follows
        await run_in_threadpool(self.credentials.entered, holder, _address(request))
        return self._enter(request, holder, target)

    async def _by_link(self, request: Request, code: str, target: str) -> Response:
        if busy := self._busy(request, target):
            return busy
        holder = await run_in_threadpool(self.credentials.of_link, code, _address(request))
        if holder is None:
            message = "This link was used, or is too old. `paceline open` prints another."
            return _page(request, target, message, HTTPStatus.UNAUTHORIZED)
        self.throttle.right(_address(request))
        return self._enter(request, holder, target)

    def _busy(self, request: Request, target: str) -> Response | None:
        """Counts the login as wrong until it turns out right, so that none overtakes the count."""
        wait_s = self.throttle.wait_s(_address(request))
        if not wait_s:
            self.throttle.wrong(_address(request))
            return None
        message = f"There were too many wrong tokens. Try again in {wait_s} s."
        busy = _page(request, target, message, HTTPStatus.TOO_MANY_REQUESTS)
        busy.headers["Retry-After"] = str(wait_s)
        return busy

    def _enter(self, request: Request, holder: Holder, target: str) -> Response:
        response = RedirectResponse(target, HTTPStatus.SEE_OTHER)
        response.set_cookie(
            COOKIE,
            self.credentials.cookie(holder),
            httponly=True,
            samesite="lax",
            secure=request.url.scheme == "https",
            max_age=int(BROWSER_S),
            path=request.scope.get("path_prefix") or "/",
        )
        return response


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _page(
    request: Request, target: str, message: str = "", status: HTTPStatus = HTTPStatus.OK
) -> Response:
    """The page to log in, which leads to `target`."""
    context = {"next": target, "message": message}
    return _templates.TemplateResponse(request, "login.html", context, status)


def _local(target: str) -> str:
    """A path of this server: a login must not lead elsewhere."""
    safe = target.startswith("/") and not target.startswith(("//", "/\\"))
    return target if safe and "\n" not in target and "\r" not in target else "/"
