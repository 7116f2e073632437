"""The web application: middleware, REST routes, event streams, health, metrics and plug-ins.

`create_app` builds the application; `web.run` serves it. Other packages add pages with entry points
in the group `paceline.web`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from importlib.metadata import entry_points

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.telemetry import TelemetryConfig
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware

from paceline.core.version import __version__
from paceline.wire.bus import connect
from paceline_backend.api import (
    admin,
    alerts,
    audit,
    compare,
    details,
    engines,
    errors,
    evidence,
    export,
    fleet,
    forecasts,
    history,
    live,
    logs,
    monitoring,
    nodes,
    openapi,
    quality,
    report,
    run_nodes,
    runs,
    switching,
    telemetry,
    tokens,
)
from paceline_backend.api.auth import CREDENTIALS, Authentication, CredentialCheck, ProxyIdentity
from paceline_backend.api.change_reader import ChangeReader
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.event_streams import Rights, Streams
from paceline_backend.api.headers import SecurityHeaders
from paceline_backend.api.idempotency import Repeats
from paceline_backend.api.identity import Scope
from paceline_backend.api.middleware import BodyLimit, PathPrefix, WakeWorkers
from paceline_backend.api.openapi import ASSETS
from paceline_backend.api.queries import known_parameters
from paceline_backend.api.rules import VIEWER, Allow, Rules
from paceline_backend.insight.figures import Figures
from paceline_backend.insight.reuse import Reused
from paceline_backend.requests.asking import Asker
from paceline_backend.server import tracing
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, meta

# Error statuses that any route of the API may return. 422: an unknown query parameter.
_REFUSALS = documented(
    *(HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    *(HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE),
    HTTPStatus.UNPROCESSABLE_ENTITY,
)
_DOCS = ("/openapi.json", "/docs", ASSETS)
_UNKNOWN = ("/api", "/api/{path:path}")
_UNOBSERVED = ("/login", "/healthz", "/readyz", "/metrics")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
# The order of paths in the OpenAPI document. Routes are also matched in this order.
_ROUTERS = (
    admin.router,
    nodes.agents_router,
    runs.router,
    switching.router,
    quality.router,
    run_nodes.router,
    engines.router,
    telemetry.router,
    report.router,
    live.router,
    evidence.attribution_router,
    evidence.hang_router,
    forecasts.scores_router,
    evidence.stacks_router,
    evidence.timeline_router,
    evidence.verdict_router,
    forecasts.router,
    history.sums_router,
    compare.router,
    details.router,
    export.router,
    runs.list_router,
    history.router,
    alerts.router,
    alerts.webhooks_router,
    fleet.router,
    audit.router,
    nodes.router,
    logs.router,
    tokens.router,
    admin.rejected_router,
)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.reader.close()
    await app.state.asker.close()
    app.state.bus.close()


def create_app(store: Store, settings: Settings) -> FastAPI:
    """Build the application on an open store, which the caller must close afterwards."""
    prefix = settings.path_prefix
    app = FastAPIOffline(
        title="Paceline",
        version=__version__,
        summary="Removes stragglers from data-parallel PyTorch training, live",
        servers=[{"url": prefix}] if prefix else None,
        docs_url=None,
        redoc_url=None,
        static_url=ASSETS,
        lifespan=_lifespan,
        telemetry=_telemetry(),
    )
    app.state.store = store
    app.state.settings = settings
    app.state.probe = meta.Probe(store)
    app.state.control_id = meta.control_id(store)
    # `web.run` replaces this function, so that event streams end when the server shuts down.
    app.state.closing = lambda: False
    # A package that imports its pages only at their first request calls this function after the
    # import. `web.run` replaces it by a function that excludes the modules from garbage collection.
    app.state.loaded = lambda: None
    app.state.figures = Figures(store)
    app.state.bus = connect(settings.bus)
    app.state.reader = ChangeReader(store, settings.bus)
    app.state.asker = Asker(settings.bus)
    app.state.logs = logs.Logs(store, app.state.asker)
    app.state.streams = Streams(settings.max_streams)
    app.state.reused = Reused()
    rules: dict[str, Allow] = dict.fromkeys((*_DOCS, *_UNKNOWN), VIEWER)
    app.state.rules = rules
    errors.install(app)
    # The middleware that is added first runs last, just before the routes.
    app.add_middleware(Repeats, store=store)
    app.add_middleware(WakeWorkers, bus=app.state.bus)
    app.add_middleware(GZipMiddleware)
    before = [*CREDENTIALS, Depends(known_parameters)]
    for router in _ROUTERS:
        app.include_router(router, prefix="/api/v1", responses=_REFUSALS, dependencies=before)
    too_large = documented(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
    app.include_router(monitoring.probes_router, responses=too_large)
    app.include_router(monitoring.metrics_router, responses=_REFUSALS, dependencies=before)
    app.include_router(openapi.router)
    app.include_router(_rest)
    # Pages are mounted last, because the dashboard answers all other paths.
    for entry in entry_points(group="paceline.web"):
        entry.load()(app)
    openapi.complete(app)
    # The middleware that is added last runs first. Authentication must come before middleware of
    # the pages, which may answer without calling a route.
    further: dict[Scope, str | None] = {
        "agent": settings.agent_token,
        "viewer": settings.viewer_token,
    }
    credentials = CredentialCheck(store, settings.token, further)
    app.state.rights = Rights(credentials.holds)
    app.state.routes = Rules(app)
    app.add_middleware(Authentication, credentials=credentials, rules=app.state.routes)
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(SecurityHeaders)
    app.add_middleware(ProxyIdentity, proxies=settings.proxies)
    app.add_middleware(PathPrefix, prefix=settings.path_prefix)
    return app


def _telemetry() -> TelemetryConfig:
    """Return FastAPI's settings for traces and metrics.

    Requests for the paths in `_UNOBSERVED` are left out. In particular, the URL of a login link
    must not be traced, because it contains a secret.
    """
    observed = tracing.now()
    return {
        "tracer_provider": observed.tracers,
        "meter_provider": observed.meters,
        # Log records would contain the messages of exceptions.
        "logs": False,
        "operation_spans": False,
        "auto_configure": False,
        "exclude": lambda scope: scope.get("path") in _UNOBSERVED,
    }


_rest = APIRouter()


@_rest.api_route("/api", methods=_METHODS, include_in_schema=False)
@_rest.api_route("/api/{path:path}", methods=_METHODS, include_in_schema=False)
def unknown(request: Request) -> None:
    """Refuse requests for unknown API paths, which would else get a page of the dashboard.

    This route accepts all methods, so it must itself answer 405 if the path has other methods.
    """
    if methods := request.app.state.routes.methods(request.url.path):
        raise HTTPException(
            HTTPStatus.METHOD_NOT_ALLOWED, headers={"Allow": ", ".join(sorted(methods))}
        )
    raise ProblemError(
        HTTPStatus.NOT_FOUND,
        f"{request.method} {request.url.path} is not part of this API; see /docs",
    )
