"""Dashboard's place in the web process, which loads Dash only when a browser opens a page.

Importing Dash and Plotly takes a second of processor time and 30 MB, and a server may run for weeks
without a browser. So `mount` registers what is known without Dash: the rule for all pages, the
cache of files, and `Pages`, which imports `app` at the first request that no route of the API
answers. It does so in a thread, so that other requests and event streams continue meanwhile.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_backend.api.rules import VIEWER

# Path prefixes of the files that `KeptFiles` caches.
_FILES = ("/assets/", "/_dash-component-suites/")
# Maximum number of cached files, about ten times the number of files of the dashboard.
_MOST_FILES = 1024
# Requests with one of these headers are not cached, because the answer depends on it.
_DEPENDS = ("if-none-match", "if-modified-since", "range")


def mount(app: FastAPI) -> None:
    """Serve the dashboard at the root of `app`, the control plane's application.

    Call this function after including the API routers, because pages answer all other paths.
    """
    # Add this middleware after the one that compresses answers, so that it caches compressed ones.
    app.add_middleware(KeptFiles)
    pages = Pages(app)
    # The callback is a POST request, but changes nothing.
    for path, method in (("/_dash-update-component", "POST"), ("/{path:path}", "GET")):
        route = Route(path, pages, include_in_schema=False)
        # Given to the constructor, GET would include HEAD.
        route.methods = {method}
        app.routes.append(route)
        # Viewers may open every page.
        app.state.rules[path] = VIEWER


class Pages:
    """ASGI application that builds the dashboard at its first request.

    While the dashboard cannot be imported or built, each request fails and is logged, and the next
    one tries again.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._built: ASGIApp | None = None
        self._building = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the dashboard."""
        if self._built is None:
            async with self._building:
                if self._built is None:
                    self._built = await run_in_threadpool(self._build)
        # Pass a copy of the scope, because the dashboard is an application of its own and replaces
        # `app` there.
        await self._built(dict(scope), receive, send)

    def _build(self) -> ASGIApp:
        from paceline_dashboard.app import build

        state = self._app.state
        built, inline = build(state.settings.path_prefix)
        state.script_hashes = [*getattr(state, "script_hashes", []), *inline]
        state.loaded()
        return built


class KeptFiles:
    """ASGI middleware that caches answers for files, which do not change while the process runs.

    Compressing all files of a page takes a second of CPU time, in which no other client is served.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self._answers: dict[tuple[str, bool], list[Message]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from the cache, or call the application."""
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if (
            scope["type"] != "http"
            or scope["method"] != "GET"
            or not any(place in scope["path"] for place in _FILES)
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
        if answer and answer[0].get("status") == 200 and len(self._answers) < _MOST_FILES:
            self._answers[key] = answer


def _copy(message: Message) -> Message:
    """Copy a message, because other middleware may change its headers."""
    if "headers" in message:
        return {**message, "headers": list(message["headers"])}
    return message
