"""Dash application of the dashboard, mounted on the control plane's FastAPI application.

Dash provides the frame, the pages and the theme. Data never passes through Dash: modules in the
browser (``assets/js``) read ``/api/v1`` and its event stream. A page therefore needs hardly any CPU
time of the server. `KeptFiles` caches the compressed files, so that a process compresses each file
only once.
"""

from __future__ import annotations

import base64
import hashlib
import json
from http import HTTPStatus
from pathlib import Path
from typing import Any

import dash
import plotly
from dash import Input, Output
from dash.exceptions import DependencyException, InvalidResourceError
from dash.fingerprint import build_fingerprint
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_backend.api.rules import VIEWER
from paceline_dashboard import pages, rank_page, run_page

ASSETS = Path(__file__).parent / "assets"

_INDEX = Path(__file__).with_name("index.html").read_text(encoding="utf-8")


# The fingerprint in the URL lets browsers cache the file of 4.5 MB for ever.
PLOTLY = "_dash-component-suites/" + build_fingerprint(
    "plotly/package_data/plotly.min.js", plotly.__version__, "0"
)


# Viewers may open every page. The callback is a POST request, but changes nothing.
RULES = dict.fromkeys(
    (
        *("/", "{path:path}", "/assets", "/_favicon.ico"),
        "/_dash-component-suites/{package_name}/{fingerprinted_path:path}",
        *("/_dash-layout", "/_dash-dependencies", "/_dash-update-component", "/_reload-hash"),
        # `_refuse_websocket` refuses this route.
        "/_dash-ws-callback",
    ),
    VIEWER,
)

# Path prefixes of the files that `KeptFiles` caches.
_FILES = ("/assets/", "/_dash-component-suites/")
# Maximum number of cached files, about ten times the number of files of the dashboard.
_MOST_FILES = 1024
# Requests with one of these headers are not cached, because the answer depends on it.
_DEPENDS = ("if-none-match", "if-modified-since", "range")


@dash.hooks.websocket_connect()  # type: ignore[untyped-decorator]
async def _refuse_websocket(_websocket: Any) -> tuple[int, str]:
    """Refuse Dash's callback WebSocket, which is not used here and has unbounded queues."""
    return 4001, "this dashboard uses no callback WebSocket"


def mount(app: FastAPI) -> None:
    """Serve the dashboard at the root of `app`, the control plane's application.

    Call this function before including the API routers.
    """
    settings = getattr(app.state, "settings", None)
    prefix = settings.path_prefix if settings is not None else ""
    modules = _modules(prefix)
    imports = json.dumps({"imports": modules})
    dashboard = dash.Dash(
        __name__,
        server=app,
        title="Paceline",
        update_title=None,
        compress=True,
        requests_pathname_prefix=f"{prefix}/",
        routes_pathname_prefix="/",
        assets_folder=str(ASSETS),
        # bridge.js imports the modules itself.
        assets_path_ignore=["js"],
        index_string=_index(prefix, imports, modules),
        # Elements of other pages do not exist when Dash checks the callbacks.
        suppress_callback_exceptions=True,
    )
    # Add this middleware last, so that it caches compressed answers.
    app.add_middleware(KeptFiles)
    # Disable the capability, because every page would otherwise open a WebSocket.
    dashboard.backend.websocket_capability = False
    dashboard.layout = pages.shell()
    _route(dashboard)
    # Dash calls this only at the first request for "/". Without this line, a first visitor of
    # /runs/… would get a page without the dashboard's styles and scripts.
    dashboard._setup_server()
    app.state.rules = {**getattr(app.state, "rules", {}), **RULES}
    # Dash raises these errors for unknown packages and files.
    for unknown in (DependencyException, InvalidResourceError):
        app.add_exception_handler(unknown, _not_found)
    # Allow two inline scripts: the start of Dash's renderer, and the import map, which must be
    # inline.
    inline = [*dashboard.csp_hashes(), _csp_hash(imports)]
    app.state.script_hashes = [*getattr(app.state, "script_hashes", []), *inline]


async def _not_found(_request: Request, _error: Exception) -> Response:
    return PlainTextResponse("there is no such file", HTTPStatus.NOT_FOUND)


def _route(dashboard: dash.Dash) -> None:
    @dashboard.callback(Output("page", "children"), Input("url", "pathname"))  # type: ignore[untyped-decorator]
    async def page(pathname: str) -> Any:
        match (dashboard.strip_relative_path(pathname) or "").split("/"):
            case [""]:
                return pages.runs_page()
            case ["forecasts"]:
                return pages.forecasts_page()
            case ["compare"]:
                return pages.compare_page()
            case ["alerts"]:
                return pages.alerts_page()
            case ["fleet"]:
                return pages.fleet_page()
            case ["launch"]:
                return pages.launch_page()
            case ["runs", run]:
                return run_page.run_page(run)
            case ["runs", run, "ranks", rank] if rank.isdecimal():
                return rank_page.rank_page(run, rank)
        return pages.missing_page(pathname)

    dashboard.clientside_callback(
        dash.ClientsideFunction("paceline", "open"),
        # The output is not used, but Dash never runs a callback without an output.
        Output("page-opened", "data"),
        Input("page-data", "data"),
    )


def _index(prefix: str, imports: str, modules: dict[str, str]) -> str:
    """Return the HTML of every page, which preloads all modules to avoid chains of imports."""
    preloads = "\n".join(f'<link rel="modulepreload" href="{url}">' for url in modules.values())
    return (
        _INDEX.replace("__IMPORTS__", imports)
        .replace("__MODULES__", preloads)
        .replace("__EARLY__", modules[f"{prefix}/assets/js/early.js"])
        .replace("__PLOTLY__", f"{prefix}/{PLOTLY}")
        .replace("__PREFIX__", prefix)
    )


def _csp_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _modules(prefix: str) -> dict[str, str]:
    """Return the versioned URL of each module, by the URL that other modules import.

    Without versions in the URLs, a browser could combine cached modules of two releases.
    """
    versions = {}
    for module in sorted((ASSETS / "js").glob("*.js")):
        url = f"{prefix}/assets/js/{module.name}"
        digest = hashlib.sha256(module.read_bytes()).hexdigest()[:12]
        versions[url] = f"{url}?v={digest}"
    return versions


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
