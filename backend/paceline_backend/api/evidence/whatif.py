"""REST: forecasts of what other policies would take, and what `auto` may do with them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool

from paceline_backend import requests
from paceline_backend.api.audit import CHANGE_REFUSALS, Expected, requester_of
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.evidence import whatif_models
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.insight.whatif.answer import FEWEST, STEPS, Forecast, kept, recommended
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, audit, runs
from paceline_backend.store.outcomes import forecasts

# A stored forecast is fresh for this number of steps or for this time, whichever is longer.
_FRESH_STEPS = 100
_FRESH_S = 60.0  # seconds


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    app.state.forecasting = asyncio.Lock()
    with Forecaster(settings.database) as app.state.forecaster:
        yield


router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, lifespan=_lifespan)


@router.get("/whatif", response_model=whatif_models.WhatIf, dependencies=[Depends(VIEWER)])
async def what_if(
    request: Request,
    run: str,
    steps: Annotated[
        int, Query(ge=FEWEST, le=1024, description="number of newest complete steps to use")
    ] = STEPS,
    refresh: Annotated[
        bool, Query(description="make a new forecast even if a fresh one is stored")
    ] = False,
) -> Any:
    """Return forecasts for each preset. The first request takes seconds; its result is reused."""
    store = store_of(request)
    asked = time.time()
    forecast = await run_in_threadpool(_kept, store, run, steps, 0.0)
    if forecast is None or refresh:
        async with request.app.state.forecasting:
            # Another request may have stored a forecast while this one waited for the lock.
            since = asked if refresh else 0.0
            forecast = await run_in_threadpool(_kept, store, run, steps, since)
            if forecast is None:
                forecaster: Forecaster = request.app.state.forecaster
                forecast = await asyncio.wrap_future(forecaster.submit(run, steps))
                if forecast.step is not None and steps == STEPS:
                    await run_in_threadpool(_keep, store, forecast)
    best = recommended(forecast)
    row = await run_in_threadpool(runs.get, store, run)
    return {
        **msgspec.to_builtins(forecast),
        "recommended": (best and best.label) or None,
        "quality": {name: row[name] for name in ("target", "evaluation")},
    }


def _kept(store: Store, run: str, steps: int, made_since: float) -> Forecast | None:
    """Return the newest stored forecast if it is fresh and was made at or after `made_since`.

    Only forecasts over `STEPS` steps are stored, so any other number of steps returns None.
    """
    with store.read() as connection:
        key = runs.key_of(connection, run)
        bodies = forecasts.bodies(connection, key)
        newest = forecasts.newest_step(connection, key)
        version = forecasts.version(connection, key)
    whole = [made for made in kept(bodies) if made.all_presets]
    if not whole or steps != STEPS:
        return None
    forecast = whole[-1]
    assert forecast.step is not None
    near = newest - _FRESH_STEPS <= forecast.step <= newest
    fresh = near or time.time() - forecast.made_at <= _FRESH_S
    current = forecast.current.version == version
    return forecast if fresh and current and forecast.made_at >= made_since else None


def _keep(store: Store, forecast: Forecast) -> None:
    with store.write() as connection:
        key = runs.key_of(connection, forecast.run)
        forecasts.add(connection, key, msgspec.to_builtins(forecast))


@router.get("/auto", response_model=whatif_models.Auto, dependencies=[Depends(VIEWER)])
def get_auto(request: Request, run: str) -> Any:
    """Return what `auto` may do with the run, and its last decision."""
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
        auto = forecasts.auto(connection, key)
        decided = forecasts.decided(connection, key)
        revision = audit.revision_of(connection, run)
    last = decided and {**decided["decision"], "at": decided["made_at"]}
    return {**auto, "last": last, "revision": revision}


@router.put(
    "/auto",
    response_model=whatif_models.Auto,
    responses={**documented(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT), **CHANGE_REFUSALS},
    dependencies=[Depends(OPERATOR)],
)
def set_auto(request: Request, run: str, expected: Expected, body: whatif_models.AutoMode) -> Any:
    """Set whether the run's forecasts are only shown, recommend a policy, or switch to it."""
    by = requester_of(request, body.by, body.why, body.operator)
    details = {"mode": body.mode, "relaxed": body.relaxed}
    with store_of(request).write() as connection:
        if body.mode != "off":
            requests.refuse_observed(run, runs.launched(connection, run).policy)
        audit.record_change(
            connection, audit.RequestedChange(run, by, expected), "run.auto", details
        )
        forecasts.set_auto(connection, run, body.mode, by.name, time.time(), body.relaxed)
    return get_auto(request, run)
