"""Dash application of the dashboard. `lazy` builds it at the first request of a page.

Dash provides the frame, the pages and the theme. Data never passes through Dash: modules in the
browser (``assets/js``) read ``/api/v1`` and its event stream. A page therefore needs hardly any CPU
time of the server.
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
from fastapi.telemetry import TelemetryConfig

from paceline_backend.api import errors
from paceline_dashboard import pages, rank_page, run_page

ASSETS = Path(__file__).parent / "assets"

_INDEX = Path(__file__).with_name("index.html").read_text(encoding="utf-8")


# The fingerprint in the URL lets browsers cache the file of 4.5 MB for ever.
PLOTLY = "_dash-component-suites/" + build_fingerprint(
    "plotly/package_data/plotly.min.js", plotly.__version__, "0"
)


def build(prefix: str) -> tuple[FastAPI, list[str]]:
    """Build the dashboard for a server below a path prefix.

    Returns:
        The application that answers requests for pages, and the hashes of its inline scripts.
    """
    # The control plane's application records traces.
    untraced: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}
    app = FastAPI(openapi_url=None, telemetry=untraced)
    errors.install(app)
    modules = _modules(prefix)
    imports = json.dumps({"imports": modules})
    dashboard = dash.Dash(
        __name__,
        server=app,
        title="Paceline",
        update_title=None,
        requests_pathname_prefix=f"{prefix}/",
        routes_pathname_prefix="/",
        assets_folder=str(ASSETS),
        # bridge.js imports the modules itself.
        assets_path_ignore=["js"],
        index_string=_index(prefix, imports, modules),
        # Elements of other pages do not exist when Dash checks the callbacks.
        suppress_callback_exceptions=True,
    )
    # Disable the capability, because every page would otherwise open a WebSocket.
    dashboard.backend.websocket_capability = False
    dashboard.layout = pages.shell()
    _route(dashboard)
    # Dash calls this only at the first request for "/". Without this line, a first visitor of
    # /runs/… would get a page without the dashboard's styles and scripts.
    dashboard._setup_server()
    # Dash adds the route for all other paths when its server starts, and this one has started.
    dashboard.backend._setup_catchall()
    # Dash raises these errors for unknown packages and files.
    for unknown in (DependencyException, InvalidResourceError):
        app.add_exception_handler(unknown, _not_found)
    # Allow two inline scripts: the start of Dash's renderer, and the import map, which must be
    # inline.
    return app, [*dashboard.csp_hashes(), _csp_hash(imports)]


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
