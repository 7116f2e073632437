"""REST: the phases of ranks within a few steps."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.telemetry import Steps
from paceline_backend.requests import InvalidRequestError
from paceline_backend.store import reads, runs

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

# Number of steps if the request gives no range.
_STEPS = 3
_MOST_STEPS = 50
_MOST_RANKS = 64

Column = list[float | None]


class RunTimeline(BaseModel):
    """Phases of each rank: ``column[rank][step]``, ranks in the given order; null: no record."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int = Field(alias="from", description="first step", examples=[118])
    to: int = Field(description="last step", examples=[120])
    ranks: list[int] = Field(examples=[[0]])
    step: list[int] = Field(examples=[[118, 119, 120]])
    began_at: list[Column] = Field(
        description="Unix time at which the rank starts to wait for its data, by the clock of its "
        "node"
    )
    data_s: list[Column]
    compute_s: list[Column]
    wait_s: list[Column] = Field(description="waiting for slower ranks")
    reduce_s: list[Column] = Field(description="the reduction itself")
    rest_s: list[Column] = Field(description="rest of the step: optimiser and script")


@router.get("/timeline", response_model=RunTimeline)
def get_timeline(
    request: Request,
    run: str,
    ranks: Annotated[
        str,
        Query(
            max_length=640,
            pattern=r"^\d{1,9}(,\d{1,9})*$",
            description="at most 64 ranks",
            examples=["0,3"],
        ),
    ],
    steps: Steps,
) -> Any:
    """Return the phases of ranks in at most 50 steps, by default the newest 3."""
    chosen = list(dict.fromkeys(map(int, ranks.split(","))))
    if len(chosen) > _MOST_RANKS:
        raise InvalidRequestError("ranks", f"name at most {_MOST_RANKS} ranks")
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
        span = reads.newest_steps(connection, key, _STEPS) or (0, 0)
        first, to = steps.span
        span = (span[0] if first is None else first, span[1] if to is None else to)
        if not 0 <= span[1] - span[0] < _MOST_STEPS:
            words = f"give a range of 1 to {_MOST_STEPS} steps, such as from=100&to=102"
            raise InvalidRequestError("to", words)
        return reads.timeline(connection, key, *span, chosen)
