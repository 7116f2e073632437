"""REST: telemetry that a run's ranks reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from paceline_backend import policies
from paceline_backend.api import report_models, step_models
from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import reused_of, store_of
from paceline_backend.insight import workers
from paceline_backend.insight.report import round_words
from paceline_backend.policies import Predictor
from paceline_backend.requests import InvalidRequestError
from paceline_backend.store import choices, coverage, reads, rounds, switches
from paceline_backend.store import runs as runs_store
from paceline_backend.store.details import epochs
from paceline_backend.store.rollups.reading import RankChoice

log = logging.getLogger(__name__)
router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

# Maximum number of choices of synchronisers. A chart cannot show more of them distinctly.
_MOST_CHOICES = 200
# Greatest integer that a database can store.
BIGGEST = 2**63 - 1
Points = Annotated[
    int, Query(ge=2, le=5000, description="maximum number of points; longer ranges are thinned out")
]
Since = Annotated[
    float | None,
    Query(allow_inf_nan=False, description="steps that ended at this Unix time or later"),
]
Until = Annotated[
    float | None, Query(allow_inf_nan=False, description="steps that ended before this Unix time")
]
Ranks = Annotated[
    str | None,
    Query(
        # Bounds the number of ranks to what a database accepts in a list.
        max_length=50_000,
        pattern=r"^\d{1,9}(,\d{1,9})*$",
        description="only these ranks",
        examples=["0,3"],
    ),
]


class StepRange(BaseModel):
    """Query parameters that select steps of a run."""

    first: Annotated[
        int | None, Query(alias="from", ge=0, le=BIGGEST, description="first step, included")
    ] = None
    to: Annotated[int | None, Query(ge=0, le=BIGGEST, description="last step, included")] = None

    @property
    def span(self) -> reads.Range:
        """Return the range as the store takes it."""
        return self.first, self.to


class WorkerStepQuery(StepRange):
    """Query parameters that select steps of ranks, and their columns."""

    points: Points = 1000
    ranks: Ranks = None
    since: Since = None
    until: Until = None
    columns: Annotated[
        list[step_models.MoreColumn],
        Query(max_length=20, description="further columns", examples=[["data_s", "loss"]]),
    ] = []


Steps = Annotated[StepRange, Query()]
# Maximum number of rows to read for columns that have no roll-ups.
_MOST_ROWS = 2_000_000


def ranks_of(given: str | None) -> list[int] | None:
    """Parse a list of ranks; None: all ranks."""
    return None if given is None else [int(rank) for rank in given.split(",")]


@router.get("/workers", response_model=list[step_models.WorkerSummary])
def list_workers(
    request: Request,
    run: str,
    last: Annotated[
        int, Query(ge=1, le=1000, description="number of newest steps to average")
    ] = 50,
) -> Any:
    """List the ranks with means over their newest steps."""
    store = store_of(request)
    asked = switches.rows(store, run)
    predictor = _predictor(asked[-1]) if asked else None
    with store.read() as connection:
        key = runs_store.key_of(connection, run)

    def summary() -> list[dict[str, Any]]:
        with store.read() as connection:
            return workers.summary(connection, key, last, predictor)

    return reused_of(request).get(
        ("workers", key, last, asked[-1]["version"] if asked else None), summary
    )


def _predictor(switch: Mapping[str, Any]) -> Predictor | None:
    """Return the predictor of a policy; None: this server no longer has the policy."""
    try:
        return policies.make(switch["policy"], switch["parameters"]).predictor
    except ValueError as error:
        log.info("cannot create the predictor of a policy: %s", error)
        return None


@router.get("/steps", response_model=step_models.StepColumns, response_model_exclude_unset=True)
def list_steps(
    request: Request,
    run: str,
    steps: Steps,
    points: Points = 1000,
    since: Since = None,
    until: Until = None,
) -> Any:
    """Return complete steps as columns."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        span = reads.steps_between(connection, key, since, until, steps.span)
        return reads.step_columns(connection, key, span, points)


@router.get(
    "/worker-steps", response_model=step_models.WorkerStepColumns, response_model_exclude_unset=True
)
def list_worker_steps(
    request: Request, run: str, steps: Annotated[WorkerStepQuery, Query()]
) -> Any:
    """Return the steps of each rank as columns.

    With more than 1,024 ranks, the response has every k-th rank and fewer points, unless the
    request names ranks.
    """
    only, points = ranks_of(steps.ranks), steps.points
    store = store_of(request)
    world = runs_store.get(store, run)["world"]
    more = tuple(dict.fromkeys(steps.columns))
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
        span = reads.steps_between(connection, key, steps.since, steps.until, steps.span)
        if more:
            _refuse_long(reads.reported_bounds(connection, key, span), world)
        every = reads.shown_every(world)
        if only is None:
            points = reads.shown_steps(world, points)
        which = RankChoice(only, every)
        return reads.worker_step_columns(connection, key, span, points, which, more)


def _refuse_long(span: reads.Range, world: int | None) -> None:
    first, last = span
    if first is None or last is None or (last - first + 1) * (world or 1) <= _MOST_ROWS:
        return
    most = max(1, _MOST_ROWS // (world or 1))
    message = (
        f"at most {most:,} steps of these columns can be read at once: narrow the range with "
        "`from` and `to`, or use GET export?table=worker-steps"
    )
    raise InvalidRequestError("columns", message)


@router.get("/segments", response_model=list[step_models.SegmentInfo])
def list_segments(
    request: Request,
    run: str,
    steps: Steps,
    limit: Annotated[
        int, Query(ge=1, le=100_000, description="maximum number of rows; the newest are returned")
    ] = 10_000,
) -> Any:
    """List the segments that ran, in order."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return reads.segment_rows(connection, key, steps.span, limit)


@router.get("/coasts", response_model=list[step_models.Coast])
def list_coasts(request: Request, run: str, steps: Steps, points: Points = 1000) -> Any:
    """List spans of steps that no controller planned: first and last step of each."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return reads.coasts(connection, key, steps.span, points)


@router.get("/rounds", response_model=list[report_models.RoundInfo])
def list_rounds(
    request: Request,
    run: str,
    steps: Steps,
    limit: Annotated[
        int, Query(ge=1, le=100_000, description="maximum number of rows; the newest are returned")
    ] = 10_000,
) -> Any:
    """List rounds of relaxed synchronisers, in order. An all-reduce has no rounds."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return rounds.rows(connection, key, steps.span, limit)


@router.get("/data", response_model=list[report_models.NodeEpoch])
def list_data(
    request: Request,
    run: str,
    limit: Annotated[
        int, Query(ge=1, le=100_000, description="maximum number of rows; the newest are returned")
    ] = 10_000,
) -> Any:
    """List the data that each node fetched per epoch, and how long steps waited for data."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        return epochs.data_moved(connection, key, limit)


@router.get("/synchronisation", response_model=report_models.Synchronisation)
def get_synchronisation(request: Request, run: str, steps: Steps, points: Points = 200) -> Any:
    """Return how gradients were synchronised.

    The response has sums per policy version, values over time, choices of policies, and fallbacks.
    An all-reduce has no rounds.
    """
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        summary = rounds.summary(connection, key, steps.span, points)
        summary["chosen"] = choices.chosen(connection, key, steps.span, _MOST_CHOICES)
        summary["fallbacks"] = choices.fallbacks(connection, key, steps.span)
    for version in summary["in_force"]:
        version["words"] = round_words(version)
    return summary


@router.get("/coverage", response_model=report_models.Coverage)
def get_coverage(request: Request, run: str) -> Any:
    """Return whether each epoch used each sample once, and the number of dropped samples."""
    with store_of(request).read() as connection:
        return coverage.coverage(connection, runs_store.key_of(connection, run))
