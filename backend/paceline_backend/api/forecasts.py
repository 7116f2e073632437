"""REST: forecasts of other policies' step times, the rights of `auto`, and scores of forecasts.

A forecast takes seconds of CPU time, so forecasts are made one at a time in a separate process, and
stored. `auto` acts on stored forecasts. Scores compare forecasts with measurements after the
switch, over all runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from paceline_backend import requests
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.models import ChangeRequest, EvaluationInfo, Target
from paceline_backend.api.preconditions import CHANGE_REFUSALS, Expected, requester_of
from paceline_backend.api.queries import Page
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import store_of
from paceline_backend.insight import scores
from paceline_backend.insight.whatif.answer import (
    FEWEST_FORECAST_STEPS,
    FORECAST_STEPS,
    Decision,
    Forecast,
    LeftOut,
    NodeForecast,
    PolicyInForce,
    PresetForecast,
    kept,
    recommended,
)
from paceline_backend.insight.whatif.child import Forecaster
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store, audit, runs
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.outcomes.effects import OutcomeFilter

# A stored forecast is fresh for this number of steps, or for this time if that is longer.
_FRESH_STEPS = 100
_FORECAST_FRESH_S = 60.0  # seconds


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings: Settings = app.state.settings
    app.state.forecasting = asyncio.Lock()
    with Forecaster(settings.database) as app.state.forecaster:
        yield


router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, lifespan=_lifespan)
scores_router = APIRouter(
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(VIEWER)],
)


class QualityNow(BaseModel):
    """Target of a run, and its newest evaluation."""

    target: Target | None = Field(description="target of the run; null: none is set")
    evaluation: EvaluationInfo | None = Field(description="newest evaluation; null: none")


class WhatIf(BaseModel):
    """Forecasts for each preset, best first. If no forecast is possible, `reason` explains why."""

    run: str = Field(examples=["3f9a1c07be52"])
    made_at: float = Field(description="Unix time", examples=[1767225700.0])
    step: int | None = Field(description="last step that the forecast uses", examples=[263])
    first_step: int | None = Field(examples=[200])
    steps: int = Field(description="number of complete steps that the forecast uses", examples=[64])
    current: PolicyInForce
    fit_error: float | None = Field(
        description="error of the models on the batches that ran; widens all intervals",
        examples=[0.01],
    )
    reason: str | None = Field(examples=[None])
    forecasts: list[PresetForecast]
    recommended: str | None = Field(
        description="label of the recommended forecast, if one clearly saves time: never one that "
        "changes the training; one that keeps the batches as they are, unless another is clearly "
        "faster",
        examples=["paceline"],
    )
    left_out: list[LeftOut]
    speeds: list[float] = Field(
        description="seconds per size unit of each rank, for an equal share", examples=[[3.6e-05]]
    )
    replicates: int = Field(description="simulations of each preset", examples=[8])
    slow_node: NodeForecast | None = Field(
        description="forecast of the policy in force if the slow node were as fast as the others"
    )
    assumes: str = Field(
        description="assumptions of the forecasts about an observed run; empty: none", examples=[""]
    )
    quality: QualityNow = Field(
        description="metrics that the run's model has reached; forecasts do not predict metrics"
    )


class AutoMode(ChangeRequest):
    """Request to set what `auto` may do with a run."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool | None = Field(
        default=None,
        description="presets that change the training may also be chosen; null: unchanged",
    )


@dataclass(frozen=True)
class AutoDecision(Decision):
    """Decision of `auto` on a forecast; savings are ratios."""

    at: float = Field(description="Unix time", examples=[1767225700.0])


class Auto(BaseModel):
    """Rights of `auto` on a run, and its last decision."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool = Field(description="presets that change the training may also be chosen")
    requested_at: float | None = Field(examples=[1767225650.0])
    requested_by: str | None = Field(examples=["api"])
    last: AutoDecision | None
    revision: int = Field(
        description="revision of the run, for the `If-Match` header of a change", examples=[0]
    )


@router.get("/whatif", response_model=WhatIf, dependencies=[Depends(VIEWER)])
async def what_if(
    request: Request,
    run: str,
    steps: Annotated[
        int,
        Query(
            ge=FEWEST_FORECAST_STEPS, le=1024, description="number of newest complete steps to use"
        ),
    ] = FORECAST_STEPS,
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
                if forecast.step is not None and steps == FORECAST_STEPS:
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

    Only forecasts over `FORECAST_STEPS` steps are stored, so any other number of steps returns
    None.
    """
    with store.read() as connection:
        key = runs.key_of(connection, run)
        bodies = forecasts.bodies(connection, key)
        newest = forecasts.newest_step(connection, key)
        version = forecasts.version(connection, key)
    whole = [made for made in kept(bodies) if made.all_presets]
    if not whole or steps != FORECAST_STEPS:
        return None
    forecast = whole[-1]
    assert forecast.step is not None
    near = newest - _FRESH_STEPS <= forecast.step <= newest
    fresh = near or time.time() - forecast.made_at <= _FORECAST_FRESH_S
    current = forecast.current.version == version
    return forecast if fresh and current and forecast.made_at >= made_since else None


def _keep(store: Store, forecast: Forecast) -> None:
    with store.write() as connection:
        key = runs.key_of(connection, forecast.run)
        forecasts.add(connection, key, msgspec.to_builtins(forecast))


@router.get("/auto", response_model=Auto, dependencies=[Depends(VIEWER)])
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
    response_model=Auto,
    responses={**documented(HTTPStatus.BAD_REQUEST, HTTPStatus.CONFLICT), **CHANGE_REFUSALS},
    dependencies=[Depends(OPERATOR)],
)
def set_auto(request: Request, run: str, expected: Expected, body: AutoMode) -> Any:
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


class Scores(BaseModel):
    """Forecasts compared with what was measured after the switch."""

    all: scores.Score
    presets: list[scores.PresetScore] = Field(description="presets with the most outcomes first")
    items: list[scores.SwitchOutcome] = Field(description="newest first")
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])


class OutcomeQuery(BaseModel):
    """Query parameters that select outcomes of forecasts."""

    since: Annotated[float | None, Query(description="switches at this Unix time or later")] = None
    until: Annotated[float | None, Query(description="switches before this Unix time")] = None
    policy: Annotated[str | None, Query(max_length=100, description="switches to this preset")] = (
        None
    )
    nodes: Annotated[
        int | None,
        Query(ge=1, le=1_000_000, description="switches of runs on this number of nodes"),
    ] = None
    simulated: Annotated[bool, Query(description="include simulated runs")] = False


@scores_router.get("/forecasts/scores")
def get_scores(request: Request, asked: Annotated[OutcomeQuery, Query()], page: Page) -> Scores:
    """Return the accuracy of forecasts, including those for deleted runs."""
    which = OutcomeFilter(**asked.model_dump())
    with store_of(request).read() as connection:
        items, following = scores.outcomes(connection, which, page.limit, page.cursor)
        everything, _ = scores.outcomes(connection, which, scores.MOST_OUTCOMES)
    return Scores(
        all=scores.score(everything),
        presets=scores.by_policy(everything),
        items=items,
        next_cursor=following,
    )
