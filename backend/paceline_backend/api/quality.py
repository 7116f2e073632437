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
        description="value of the metric for the global batch of each step; if a point combines "
        "several steps, their mean; null: not a finite number",
        examples=[[0.5, 0.6]],
    )
    min: list[float | None] | None = Field(
        default=None,
        description="minimum of the metric in each point, if a point combines several steps",
        examples=[None],
    )
    max: list[float | None] | None = Field(
        default=None,
        description="maximum of the metric in each point, if a point combines several steps",
        examples=[None],
    )


class Metrics(BaseModel):
    """A run's training metrics, without the loss."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(alias="from", examples=[0])
    to: int | None = Field(examples=[279])
    bucket: int = Field(description="number of steps per point", examples=[1])
    metrics: dict[str, MetricColumns] = Field(
        description="training metrics by name, without the loss; empty: none"
    )


class BestValue(BaseModel):
    """Best, lowest or highest value of a metric in a run, and when it was first measured."""

    metric: str = Field(examples=["accuracy"])
    figure: Literal["best", "least", "greatest"] = Field(
        description="best: best value, only if the run's target or the metric's name `loss` shows "
        "which values are better; least, greatest: lowest and highest value of any other metric"
    )
    value: float = Field(examples=[0.91])
    step: int = Field(
        description="last step before the value was first measured; -1: no step came before it",
        examples=[279],
    )
    epoch: int = Field(
        description="epoch of the last step before the value was first measured", examples=[19]
    )
    trained: int = Field(
        description="number of samples that the run had trained on when the value was first "
        "measured",
        examples=[17_180],
    )
    at: float = Field(
        description="Unix time at which the value was first measured", examples=[1767225704.0]
    )
    after_s: float | None = Field(
        description="seconds from the start of the run until the value was first measured; null: "
        "unknown",
        examples=[100.5],
    )


class Quality(BaseModel):
    """Metrics that a run's model has reached, and when."""

    queued_s: float | None = Field(
        description="seconds from the run's creation to its start; null: not started, or simulated",
        examples=[3.5],
    )
    jct_s: float | None = Field(
        description="job completion time: seconds from the run's start to its end; null: not "
        "started, or not ended",
        examples=[100.5],
    )
    eta_at: float | None = Field(
        description="expected end of the run as Unix time; null: not training, or unknown",
        examples=[None],
    )
    target: Target | None = Field(description="target of the run; null: no target is set")
    best: list[BestValue] = Field(
        description="best value of each metric over all evaluations of the run"
    )
    evaluations: list[EvaluationInfo] = Field(
        description="newest 1,000 evaluations of the run, oldest first"
    )


class NewTarget(ChangeRequest):
    """Request to set the target of a run."""

    metric: MetricName = Field(
        description="metric of evaluations that should reach the target; loss: if no evaluation "
        "has a loss, the training loss is used",
        examples=["accuracy"],
    )
    value: float = Field(gt=-1e100, lt=1e100, examples=[0.9])
    direction: Direction = Field(
        description="values that meet the target: >= (at least `value`) or <= (at most `value`)",
        examples=[">="],
    )


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
    """List the best value of each metric over all evaluations, and when it was first measured."""
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
