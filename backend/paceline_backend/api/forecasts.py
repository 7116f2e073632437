"""REST: forecasts of step times under other policies, settings of `auto`, and scores of forecasts.

A forecast takes seconds of CPU time, so forecasts are made one at a time in a separate process, and
stored. `auto` uses stored forecasts to recommend policies, or to switch to them. Scores compare
forecasts with the step times after policy switches, over all runs.
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
    """Forecasts of the step time under each preset, best first. If there are none, see `reason`."""

    run: str = Field(examples=["3f9a1c07be52"])
    made_at: float = Field(
        description="Unix time at which the forecasts were made", examples=[1767225700.0]
    )
    step: int | None = Field(
        description="last step that the forecasts are based on; null: no forecast", examples=[263]
    )
    first_step: int | None = Field(examples=[200])
    steps: int = Field(
        description="number of complete steps that the forecasts are based on", examples=[64]
    )
    current: PolicyInForce
    fit_error: float | None = Field(
        description="relative error of the times that the model predicts for the batches that ran; "
        "it widens the forecasts' intervals; null: no forecast",
        examples=[0.01],
    )
    reason: str | None = Field(
        description="why there is no forecast; null: there are forecasts", examples=[None]
    )
    forecasts: list[PresetForecast]
    recommended: str | None = Field(
        description="`label` of the recommended preset, which never changes the training, and "
        "changes the batches only if that is clearly faster; null: no preset clearly saves time",
        examples=["paceline"],
    )
    left_out: list[LeftOut]
    speeds: list[float] = Field(
        description="for each rank, its seconds per size unit when it computes an equal share of a "
        "mean batch",
        examples=[[3.6e-05]],
    )
    replicates: int = Field(description="number of simulations of each preset", examples=[8])
    slow_node: NodeForecast | None = Field(
        description="forecast of the step time under the policy in force, if the slow node were as "
        "fast as the others; null: no node is slow"
    )
    assumes: str = Field(
        description="what the forecasts assume because the run is observed and therefore reports "
        "no sizes; empty: nothing",
        examples=[""],
    )
    quality: QualityNow = Field(
        description="target and newest evaluation of the run; the forecasts do not predict metrics"
    )


class AutoMode(ChangeRequest):
    """Request to set what `auto` may do with a run."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool | None = Field(
        default=None,
        description="true: `auto` may also choose presets that change the training; null: "
        "unchanged",
    )


@dataclass(frozen=True)
class AutoDecision(Decision):
    """Decision of `auto` about a forecast. Savings are shares of the step time."""

    at: float = Field(
        description="Unix time at which the forecast was made", examples=[1767225700.0]
    )


class Auto(BaseModel):
    """Permissions of `auto` for a run, and its last decision."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool = Field(
        description="true: `auto` may also choose presets that change the training"
    )
    requested_at: float | None = Field(examples=[1767225650.0])
    requested_by: str | None = Field(examples=["api"])
    last: AutoDecision | None = Field(description="last decision of `auto`; null: none yet")
    revision: int = Field(
        description="revision of the run, for the `If-Match` header of a request to change the run",
        examples=[0],
    )


@router.get("/whatif", response_model=WhatIf, dependencies=[Depends(VIEWER)])
async def what_if(
    request: Request,
    run: str,
    steps: Annotated[
        int,
        Query(
            ge=FEWEST_FORECAST_STEPS,
            le=1024,
            description="number of newest complete steps that the forecasts are based on",
        ),
    ] = FORECAST_STEPS,
    refresh: Annotated[
        bool, Query(description="true: make a new forecast even if a fresh one is stored")
    ] = False,
) -> Any:
    """Return forecasts of the step time under each preset.

    The first request takes seconds. Later requests get the stored result while it is fresh.
    """
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

    Only forecasts that are based on `FORECAST_STEPS` steps are stored, so the result is None for
    any other number of `steps`.
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
    """Set what `auto` may do with a run: nothing, recommend policies, or switch to them."""
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
    """Accuracy of forecasts, compared with the step times measured after policy switches."""

    all: scores.Score
    presets: list[scores.PresetScore] = Field(
        description="accuracy for each preset; presets with the most switches come first"
    )
    items: list[scores.SwitchOutcome] = Field(
        description="switches, each with the forecast and the measured saving, newest first"
    )
    next_cursor: str | None = Field(
        description="`cursor` for the next page; null: this is the last page", examples=["MTIz"]
    )


class OutcomeQuery(BaseModel):
    """Query parameters that select the policy switches whose forecasts are scored."""

    since: Annotated[
        float | None, Query(description="only switches at this Unix time or later")
    ] = None
    until: Annotated[float | None, Query(description="only switches before this Unix time")] = None
    policy: Annotated[
        str | None, Query(max_length=100, description="only switches to this preset")
    ] = None
    nodes: Annotated[
        int | None,
        Query(ge=1, le=1_000_000, description="only switches of runs on this number of nodes"),
    ] = None
    simulated: Annotated[bool, Query(description="true: include switches of simulated runs")] = (
        False
    )


@scores_router.get("/forecasts/scores")
def get_scores(request: Request, asked: Annotated[OutcomeQuery, Query()], page: Page) -> Scores:
    """Return the accuracy of forecasts, including forecasts for deleted runs."""
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
