"""The web application: REST, events, health, and whatever else mounts itself."""

from __future__ import annotations

from http import HTTPStatus
from importlib.metadata import entry_points

from fastapi import APIRouter, FastAPI, Request
from fastapi_offline import FastAPIOffline

from paceline.core.version import __version__
from paceline_backend.api import (
    attribution,
    errors,
    events,
    health,
    metrics,
    runs,
    telemetry,
    whatif,
)
from paceline_backend.api.auth import CREDENTIALS, Guard
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.headers import SecurityHeaders
from paceline_backend.api.limits import BodyLimit
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, meta

# What middleware answers, whatever the route.
_REFUSALS = documented(
    HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_ENTITY_TOO_LARGE
)
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


def create_app(store: Store, settings: Settings) -> FastAPI:
    """The application over an open store; the caller closes the store after it."""
    app = FastAPIOffline(
        title="Paceline",
        version=__version__,
        summary="Removes stragglers from data-parallel PyTorch training, live",
        docs_url="/docs",
        redoc_url=None,
        static_url="/docs-assets",
        swagger_ui_parameters={"validatorUrl": None},
    )
    app.state.store = store
    app.state.settings = settings
    app.state.control_id = meta.control_id(store)
    app.state.closing = lambda: False  # who runs the server tells event streams when to end
    app.state.sse_clients = 0
    errors.install(app)
    # Pages first: Dash registers a catch-all for what nobody else answers.
    for entry in entry_points(group="paceline.web"):
        entry.load()(app)
    reads = (telemetry.router, attribution.router, whatif.router)
    for router in (runs.router, *reads, events.router):
        app.include_router(router, prefix="/api/v1", responses=_REFUSALS, dependencies=CREDENTIALS)
    app.include_router(health.router, responses=documented(HTTPStatus.REQUEST_ENTITY_TOO_LARGE))
    app.include_router(metrics.router, responses=_REFUSALS, dependencies=CREDENTIALS)
    app.include_router(_rest)
    # Last, and so in front: pages bring middleware that reads bodies.
    app.add_middleware(Guard, token=settings.token)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(SecurityHeaders)
    return app


_rest = APIRouter()


@_rest.api_route("/api", methods=_METHODS, include_in_schema=False)
@_rest.api_route("/api/{path:path}", methods=_METHODS, include_in_schema=False)
def unknown(request: Request) -> None:
    """Keeps the pages' catch-all from answering for the API."""
    raise ProblemError(
        HTTPStatus.NOT_FOUND,
        f"{request.method} {request.url.path} is not part of this API; see /docs",
    )
