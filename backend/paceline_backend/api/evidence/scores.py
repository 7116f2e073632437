"""REST: forecast accuracy over all runs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from paceline_backend.api.audit.routes import Page
from paceline_backend.api.errors import ProblemError, documented
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.insight import scores
from paceline_backend.store.outcomes.effects import OutcomeFilter
from paceline_backend.store.runs import CursorError

router = APIRouter(
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE),
    dependencies=[Depends(VIEWER)],
)


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


@router.get("/forecasts/scores")
def get_scores(request: Request, asked: Annotated[OutcomeQuery, Query()], page: Page) -> Scores:
    """Return the accuracy of forecasts, including those for deleted runs."""
    which = OutcomeFilter(**asked.model_dump())
    try:
        with store_of(request).read() as connection:
            items, following = scores.outcomes(connection, which, page.limit, page.cursor)
            everything, _ = scores.outcomes(connection, which, scores.MOST)
    except CursorError as error:
        errors = [{"field": "cursor", "message": str(error)}]
        raise ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), errors=errors) from error
    return Scores(
        all=scores.score(everything),
        presets=scores.by_policy(everything),
        items=items,
        next_cursor=following,
    )
