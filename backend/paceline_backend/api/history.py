"""REST: tags and notes of runs, and sums over many runs.

The module `runs` lists runs. Its `Filter` selects runs for lists, and for the sums here.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel, Field, StringConstraints

from paceline_backend.api.errors import RUN_REFUSALS, documented
from paceline_backend.api.models import ChangeRequest, RunInfo, Text
from paceline_backend.api.preconditions import (
    CHANGE_REFUSALS,
    Expected,
    QueryRequester,
    etag,
    requester_of,
)
from paceline_backend.api.queries import moment
from paceline_backend.api.rules import OPERATOR, VIEWER
from paceline_backend.api.runs import Filter
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.insight import history
from paceline_backend.requests import labels
from paceline_backend.store import runs as runs_store
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.history import labels as stored

router = APIRouter()
sums_router = APIRouter()

Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}$")]


class Note(ChangeRequest):
    """Request to set the note of a run."""

    note: Annotated[Text, StringConstraints(max_length=10_000)] = Field(
        description="text that replaces the run's note; empty: remove the note",
        examples=["with the new data"],
    )


class TagCount(BaseModel):
    """A tag, and the number of runs that have it."""

    tag: str = Field(examples=["nightly"])
    runs: int = Field(description="number of runs with this tag", examples=[12])


@router.get(
    "/tags",
    response_model=list[TagCount],
    responses=documented(HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(VIEWER)],
)
def list_tags(request: Request) -> Any:
    """List all tags of runs, most used first."""
    with store_of(request).read() as connection:
        return stored.counted(connection)


@router.put(
    "/runs/{run}/tags/{tag}",
    response_model=RunInfo,
    responses={**RUN_REFUSALS, **documented(HTTPStatus.CONFLICT)},
    dependencies=[Depends(OPERATOR)],
)
def add_tag(request: Request, run: str, tag: Tag, by: QueryRequester) -> Any:
    """Add a tag to a run. Repeating the request changes nothing, so it needs no `If-Match`."""
    labels.tag(store_of(request), run, tag, by)
    return runs_store.get(store_of(request), run)


@router.delete(
    "/runs/{run}/tags/{tag}",
    response_model=RunInfo,
    responses=RUN_REFUSALS,
    dependencies=[Depends(OPERATOR)],
)
def remove_tag(request: Request, run: str, tag: Tag, by: QueryRequester) -> Any:
    """Remove a tag from a run. Nothing changes if the run does not have the tag."""
    labels.untag(store_of(request), run, tag, by)
    return runs_store.get(store_of(request), run)


@router.put(
    "/runs/{run}/note",
    response_model=RunInfo,
    responses={**RUN_REFUSALS, **CHANGE_REFUSALS, **documented(HTTPStatus.BAD_REQUEST)},
    dependencies=[Depends(OPERATOR)],
)
def set_note(request: Request, response: Response, run: str, expected: Expected, body: Note) -> Any:
    """Replace the note of a run."""
    by = requester_of(request, body.by, body.why, body.operator)
    labels.annotate(store_of(request), RequestedChange(run, by, expected), body.note)
    row = runs_store.get(store_of(request), run)
    response.headers["ETag"] = etag(row["revision"])
    return row


class Aggregate(BaseModel):
    """Sums and means over a group of runs.

    A field from `day` to `backend` is present only if the request groups runs by this field.
    """

    day: str | None = Field(
        default=None, description="day of the steps (UTC)", examples=["2026-01-01"]
    )
    run: str | None = Field(default=None, examples=["3f9a1c07be52"])
    node: str | None = Field(default=None, examples=["node-1"])
    policy: str | None = Field(
        default=None, description="policy that planned the steps", examples=["paceline"]
    )
    tag: str | None = Field(default=None, examples=["nightly"])
    device: str | None = Field(default=None, examples=["cpu"])
    backend: str | None = Field(default=None, examples=["local"])
    simulated: bool = Field(
        description="true: the group has only simulated runs; false: it has none"
    )
    runs: int = Field(examples=[3])
    steps: int = Field(description="number of complete steps", examples=[12_000])
    wall_s: float = Field(description="sum of the step times in seconds", examples=[3_600.0])
    step_s: float | None = Field(
        description="mean step time in seconds; null: unknown", examples=[0.3]
    )
    se: float | None = Field(
        description="mean straggler effect (SE) of the steps; null: unknown", examples=[0.1]
    )
    waste: float | None = Field(
        description="straggler waste: mean share of a step's compute phase that a rank spends "
        "waiting for the slowest rank; null: unknown",
        examples=[0.06],
    )
    worker_hours: float = Field(description="hours of all ranks together", examples=[8.0])
    waiting_hours: float = Field(
        description="hours that ranks waited for slower ranks, summed over the ranks",
        examples=[0.5],
    )
    cost: float | None = Field(
        description="cost of the time of all ranks; null: no price is set, or the runs are "
        "simulated",
        examples=[12.4],
    )
    waited_cost: float | None = Field(
        description="cost of the time that ranks waited for slower ranks; null: no price is set, "
        "or the runs are simulated",
        examples=[0.8],
    )
    currency: str | None = Field(
        description="currency of `cost` and `waited_cost`; null: no costs", examples=["USD"]
    )


@sums_router.get(
    "/history",
    response_model=list[Aggregate],
    response_model_exclude_unset=True,
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(VIEWER)],
)
def get_history(
    request: Request,
    which: Filter,
    by: Annotated[
        list[history.By],
        Query(max_length=7, description="fields to group by", examples=[["day", "node"]]),
    ] = [],  # noqa: B006
    from_day: Annotated[
        float | None, moment("Unix time on the first day (UTC) whose steps count")
    ] = None,
    to_day: Annotated[
        float | None, moment("Unix time on the last day (UTC) whose steps count")
    ] = None,
) -> Any:
    """Return sums and means over the steps of runs, by group.

    Steps from the day of `from_day` to the day of `to_day` count, both days (UTC) included.
    """
    groups, price = tuple(dict.fromkeys(by)), settings_of(request).hour_price
    with store_of(request).read() as connection:
        return history.aggregates(connection, which, groups, from_day, to_day, price)
