"""Attaches Dash to the control plane's FastAPI application.

Dash gives the shell, the pages and the theme. Numbers never pass through it: modules in the browser
(``assets/js``) read ``/api/v1`` and its event stream, so a page costs the server next to nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import dash
import plotly
from dash import Input, Output
from dash.fingerprint import build_fingerprint
from fastapi import FastAPI

from paceline_dashboard import layout

ASSETS = Path(__file__).parent / "assets"

_INDEX = Path(__file__).with_name("index.html").read_text(encoding="utf-8")


# Its fingerprint lets browsers keep the 4.5 MB for good.
PLOTLY = "/_dash-component-suites/" + build_fingerprint(
    "plotly/package_data/plotly.min.js", plotly.__version__, "0"
)


@dash.hooks.websocket_connect()  # type: ignore[untyped-decorator]
async def _refuse_websocket(_websocket: Any) -> tuple[int, str]:
    """Keeps Dash's callback WebSocket shut: nothing here uses it, and its queues have no bound."""
    return 4001, "this dashboard uses no callback WebSocket"


def mount(app: FastAPI) -> None:
    """Serves the dashboard at the application's root; call it before the API routers are included.

    Args:
        app: the control plane's application.
    """
    dashboard = dash.Dash(
        __name__,
        server=app,
        title="Paceline",
        update_title=None,
        compress=True,
        assets_folder=str(ASSETS),
        assets_path_ignore=["js"],  # modules: bridge.js imports them
        index_string=_index(),
        suppress_callback_exceptions=True,  # pages come and go
    )
    dashboard.backend.websocket_capability = False  # else every page opens one, used or not
    dashboard.layout = layout.shell()
    _route(dashboard)
    # Dash would do this at the first request for "/" only: a first visitor of /runs/… would get a
    # page without our styles and scripts.
    dashboard._setup_server()


def _route(dashboard: dash.Dash) -> None:
    @dashboard.callback(Output("page", "children"), Input("url", "pathname"))  # type: ignore[untyped-decorator]
    async def page(pathname: str) -> Any:
        match pathname.strip("/").split("/"):
            case [""]:
                return layout.runs_page()
            case ["runs", run]:
                return layout.run_page(run, PLOTLY)
        return layout.missing_page(pathname)

    dashboard.clientside_callback(
        dash.ClientsideFunction("paceline", "open"),
        Output("page-opened", "data"),  # unused; without an output it would not run for new pages
        Input("page-data", "data"),
    )


def _index() -> str:
    """The HTML around every page, with an import map that gives each module its content's version.

    Without it a browser may combine modules of two releases from its cache.
    """
    imports = {}
    for module in sorted((ASSETS / "js").glob("*.js")):
        url = f"/assets/js/{module.name}"
        digest = hashlib.sha256(module.read_bytes()).hexdigest()[:12]
        imports[url] = f"{url}?v={digest}"
    return _INDEX.replace("__IMPORTS__", json.dumps({"imports": imports}))
