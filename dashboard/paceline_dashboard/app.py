"""Attaches Dash to the control plane's FastAPI application.

Dash gives the shell, the pages and the theme. Numbers never pass through it: the browser's own modules
(``assets/js``) read ``/api/v1`` and its event stream, so that a page costs the server next to nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import dash
from dash import Input, Output
from fastapi import FastAPI

from paceline_dashboard import layout

ASSETS = Path(__file__).parent / "assets"

_INDEX = """<!DOCTYPE html>
<html lang="en">
<head>
{%metas%}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{%title%}</title>
{%favicon%}
{%css%}
<link rel="icon" href="__ICON__">
<script type="importmap">__IMPORTS__</script>
</head>
<body>
<noscript>Paceline's dashboard needs JavaScript. Everything it shows is in the API at api/v1.</noscript>
{%app_entry%}
<footer>{%config%}{%scripts%}{%renderer%}</footer>
</body>
</html>"""


@dash.hooks.websocket_connect()  # type: ignore[untyped-decorator]
async def _refuse_websocket(_websocket: Any) -> tuple[int, str]:
    """Nothing here uses Dash's callback WebSocket, whose queues grow without bound: it stays shut."""
    return 4001, "this dashboard uses no callback WebSocket"


def mount(app: FastAPI, *, store: object, bus_url: str) -> None:
    """Serves the dashboard at the application's root; call it before the API routers are included.

    Args:
        app: the control plane's application.
        store: unused, as is `bus_url`: entry points of ``paceline.web`` get both, and the dashboard
            reads the public API alone.
        bus_url: unused.
    """
    prefix = app.root_path.rstrip("/") + "/"
    dashboard = dash.Dash(
        __name__,
        server=app,
        title="Paceline",
        update_title=None,
        compress=True,
        requests_pathname_prefix=prefix,
        routes_pathname_prefix="/",
        assets_folder=str(ASSETS),
        assets_path_ignore=["js"],  # modules: bridge.js imports them
        index_string=_index(prefix),
        suppress_callback_exceptions=True,  # pages come and go
    )
    dashboard.layout = layout.shell(prefix)
    _route(dashboard)


def _route(dashboard: dash.Dash) -> None:
    @dashboard.callback(Output("page", "children"), Input("url", "pathname"))  # type: ignore[untyped-decorator]
    async def page(pathname: str) -> Any:
        path = dashboard.strip_relative_path(pathname) or ""
        match path.split("/"):
            case [""]:
                return layout.runs_page()
            case ["runs", run]:
                return layout.run_page(run)
        return layout.missing_page(pathname)

    dashboard.clientside_callback(
        dash.ClientsideFunction("paceline", "open"), Input("page-data", "data")
    )


def _index(prefix: str) -> str:
    """The HTML around every page, with an import map that gives each module its content's version.

    Without it a browser may combine modules of two releases from its cache.
    """
    imports = {}
    for module in sorted((ASSETS / "js").glob("*.js")):
        url = f"{prefix}assets/js/{module.name}"
        digest = hashlib.sha256(module.read_bytes()).hexdigest()[:12]
        imports[url] = f"{url}?v={digest}"
    return _INDEX.replace("__IMPORTS__", json.dumps({"imports": imports})).replace(
        "__ICON__", f"{prefix}assets/icon.svg"
    )
