"""REST: evaluations, training metrics and the target of a run."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field

from paceline_backend import requests
from paceline_backend.api import models
from paceline_backend.api.audit import CHANGE_REFUSALS, Expected, QueryRequester, etag, requester_of
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.quality_models import (
    BestValue,
    Direction,
    EvaluationInfo,
    MetricName,
    Metrics,
)
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.telemetry import Points, Steps
from paceline_backend.insight import quality
from paceline_backend.store import attempts, runs
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.quality import evaluations
from paceline_backend.store.quality import metrics as stored

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS)


class NewTarget(models.ChangeRequest):
    """Request to set the target of a run."""

    metric: MetricName = Field(
        description="metric of evaluations, or `loss`: then the training loss counts if the "
        "script evaluates no loss",
        examples=["accuracy"],
    )
    value: float = Field(gt=-1e100, lt=1e100, examples=[0.9])
    direction: Direction = Field(description="which values meet the target", examples=[">="])


@router.get("/evaluations", response_model=list[EvaluationInfo], dependencies=[Depends(VIEWER)])
def list_evaluations(
    request: Request,
    run: str,
    limit: Annotated[
        int,
        Query(
            ge=1, le=10_000, description="maximum number of evaluations; the newest are returned"
        ),
    ] = 1_000,
) -> Any:
    """List the evaluations of a run (measurements on held-out data), oldest first."""
    store = store_of(request)
    row = runs.get(store, run)
    with store.read() as connection:
        key = runs.key_of(connection, run)
        spans = attempts.spans(connection, key, row["attempt"])
        made = evaluations.read(connection, key, spans, limit=limit)
    return [evaluations.shown(each, row["started_at"]) for each in made]


@router.get("/best", response_model=list[BestValue], dependencies=[Depends(VIEWER)])
def list_best(request: Request, run: str) -> Any:
    """List the best value of each metric of the evaluations, with its first occurrence."""
    return quality.best_of_run(store_of(request), run)


@router.get(
    "/metrics",
    response_model=Metrics,
    response_model_exclude_unset=True,
    dependencies=[Depends(VIEWER)],
)
def get_metrics(request: Request, run: str, steps: Steps, points: Points = 1000) -> Any:
    """Return training metrics other than the loss, up to the newest complete step."""
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
        return stored.columns(connection, key, steps.span, points)


@router.put(
    "/target",
    response_model=models.RunInfo,
    responses={**CHANGE_REFUSALS, **documented(HTTPStatus.BAD_REQUEST)},
    dependencies=[Depends(OPERATOR)],
)
def set_target(
    request: Request, response: Response, run: str, expected: Expected, body: NewTarget
) -> Any:
    """Set or replace the target of a run."""
    by = requester_of(request, body.by, body.why, body.operator)
    target = {"metric": body.metric, "value": body.value, "direction": body.direction}
    requests.set_target(store_of(request), RequestedChange(run, by, expected), target)
    return _changed(request, response, run)


@router.delete(
    "/target",
    response_model=models.RunInfo,
    responses=CHANGE_REFUSALS,
    dependencies=[Depends(OPERATOR)],
)
def remove_target(
    request: Request, response: Response, run: str, expected: Expected, by: QueryRequester
) -> Any:
    """Remove the target of a run."""
    requests.set_target(store_of(request), RequestedChange(run, by, expected), None)
    return _changed(request, response, run)


def _changed(request: Request, response: Response, run: str) -> dict[str, Any]:
    row = runs.get(store_of(request), run)
    response.headers["ETag"] = etag(row["revision"])
    return row
