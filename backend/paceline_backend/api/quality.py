"""REST: quality of a run's model: evaluations, training metrics, and the run's target."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from paceline.wire import metrics
from paceline_backend import requests
from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.models import ChangeRequest, Direction, EvaluationInfo, RunInfo, Target
from paceline_backend.api.preconditions import (
    CHANGE_REFUSALS,
    Expected,
    QueryRequester,
    etag,
    requester_of,
)
from paceline_backend.api.queries import Points, Steps
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.state import store_of
from paceline_backend.insight import quality
from paceline_backend.store import attempts, runs
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.quality import evaluations
from paceline_backend.store.quality import metrics as stored

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS)


def _metric(name: str) -> str:
    if reason := metrics.of_names([name]):
        raise ValueError(reason)
    return name


MetricName = Annotated[str, AfterValidator(_metric)]


class MetricColumns(BaseModel):
    """A training metric over steps."""

    step: list[int] = Field(examples=[[0, 1]])
    value: list[float | None] = Field(
        description="value of the global batch; for a bucket, the mean", examples=[[0.5, 0.6]]
    )
    min: list[float | None] | None = Field(
        default=None, description="minimum of a bucket", examples=[None]
    )
    max: list[float | None] | None = Field(
        default=None, description="maximum of a bucket", examples=[None]
    )


class Metrics(BaseModel):
    """A run's training metrics, without the loss."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(alias="from", examples=[0])
    to: int | None = Field(examples=[279])
    bucket: int = Field(description="steps per point", examples=[1])
    metrics: dict[str, MetricColumns] = Field(description="metrics by name; empty: none")


class BestValue(BaseModel):
    """Best, least or greatest value of a metric over the evaluations, and its first occurrence."""

    metric: str = Field(examples=["accuracy"])
    figure: Literal["best", "least", "greatest"] = Field(
        description="`best` if the run's target defines which values are better, and for `loss`; "
        "otherwise `least` and `greatest`"
    )
    value: float = Field(examples=[0.91])
    step: int = Field(description="last step before it; -1: none", examples=[279])
    epoch: int = Field(description="epoch of that step", examples=[19])
    trained: int = Field(description="samples trained on by then", examples=[17_180])
    at: float = Field(description="Unix time", examples=[1767225704.0])
    after_s: float | None = Field(
        description="seconds since the start of the run; null: unknown", examples=[100.5]
    )


class Quality(BaseModel):
    """Metrics that a run's model has reached, and when."""

    queued_s: float | None = Field(description="as in `GET /runs/{id}`", examples=[3.5])
    jct_s: float | None = Field(description="as in `GET /runs/{id}`", examples=[100.5])
    eta_at: float | None = Field(description="as in `GET /runs/{id}`", examples=[None])
    target: Target | None = Field(description="null: no target is set")
    best: list[BestValue] = Field(description="best values of each metric of the evaluations")
    evaluations: list[EvaluationInfo] = Field(description="oldest first; the newest 1,000")


class NewTarget(ChangeRequest):
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
    response_model=RunInfo,
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
    response_model=RunInfo,
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
