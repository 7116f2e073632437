"""REST: how right forecasts were, over all runs."""

from __future__ import annotations

from dataclasses import asdict
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from paceline_backend.api.audit.routes import Cursor, Limit
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.switching.models import ExpectedEffect
from paceline_backend.insight import scores
from paceline_backend.store.outcomes.effects import Filter
from paceline_backend.store.runs import CursorError

router = APIRouter(
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(VIEWER)],
)


class Score(BaseModel):
    """How right forecasts were. Errors are of the time for the same load, relative to it."""

    count: int = Field(description="outcomes", examples=[12])
    inside: float | None = Field(
        description="share of measured savings inside the forecasts' 95 % intervals", examples=[0.9]
    )
    median_error: float | None = Field(description="absolute", examples=[0.004])
    p90_error: float | None = Field(description="absolute", examples=[0.019])
    bias: float | None = Field(
        description="mean error; > 0: forecasts are too long", examples=[-0.001]
    )


class PresetScore(Score):
    """The same, of one preset."""

    policy: str = Field(examples=["chronica"])


class Outcome(BaseModel):
    """A switch: what was forecast, and what was measured."""

    run: str = Field(description="which may be gone", examples=["3f9a1c07be52"])
    version: int = Field(description="of the policy", examples=[1])
    policy: str = Field(examples=["chronica"])
    at: float = Field(description="Unix time of the switch", examples=[1767225700.8])
    nodes: int | None = Field(description="null: unknown", examples=[2])
    ranks: int | None = Field(description="null: unknown", examples=[8])
    forecast: ExpectedEffect
    saving: float = Field(description="measured", examples=[0.56])
    low: float = Field(description="`low` and `high` bound 95 %", examples=[0.53])
    high: float = Field(examples=[0.58])
    error: float = Field(description="forecast time ÷ measured time − 1", examples=[0.023])
    inside: bool = Field(description="`saving` is inside the forecast's interval")


class Scores(BaseModel):
    """Forecasts against outcomes."""

    all: Score
    presets: list[PresetScore] = Field(description="those with most outcomes first")
    items: list[Outcome] = Field(description="newest first")
    next_cursor: str | None = Field(description="null: the last page", examples=["MTIz"])


@router.get("/forecasts/scores", response_model=Scores)
def get_scores(
    request: Request,
    since: Annotated[float | None, Query(description="switches at this Unix time or later")] = None,
    until: Annotated[float | None, Query(description="switches before this Unix time")] = None,
    policy: Annotated[
        str | None, Query(max_length=100, description="switches to this preset")
    ] = None,
    nodes: Annotated[
        int | None, Query(ge=1, le=1_000_000, description="ranks were on so many nodes")
    ] = None,
    simulated: Annotated[bool, Query(description="simulated runs count, too")] = False,
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Any:
    """How right forecasts were; also of runs that are gone."""
    which = Filter(since, until, policy, nodes, simulated)
    try:
        with store_of(request).read() as connection:
            page, following = scores.outcomes(connection, which, limit, cursor)
            everything, _ = scores.outcomes(connection, which, scores.MOST)
    except CursorError as error:
        errors = [{"field": "cursor", "message": str(error)}]
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), errors=errors) from error
    presets = scores.by_policy(everything)
    return {
        "all": asdict(scores.score(everything)),
        "presets": [{"policy": name, **asdict(of)} for name, of in presets.items()],
        "items": [{**asdict(item), "error": item.error, "inside": item.inside} for item in page],
        "next_cursor": following,
    }
