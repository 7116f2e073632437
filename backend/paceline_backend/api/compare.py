"""REST: comparison of runs, or of parts of runs, with confidence intervals."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from paceline.core.errors import InputError
from paceline_backend.api.errors import documented
from paceline_backend.api.models import Direction, Source
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.insight import compare
from paceline_backend.requests import InvalidRequestError

router = APIRouter()


class ComparedSide(BaseModel):
    """One side of a comparison: a run, or some of its steps."""

    model_config = ConfigDict(populate_by_name=True)

    side: str = Field(description="the side as the request named it", examples=["3f9a1c07be52@1"])
    run: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    policy: str = Field(
        description="policy in force in the side's last step", examples=["paceline"]
    )
    version: int = Field(examples=[1])
    from_: int | None = Field(
        alias="from",
        description="first compared step of this side; null: no steps",
        examples=[84],
    )
    to: int | None = Field(
        description="last compared step of this side; null: no steps", examples=[599]
    )
    steps: int = Field(
        description="number of complete steps of the side that are compared", examples=[516]
    )
    trained: list[tuple[int, int]] = Field(
        description="pairs of numbers: a step of the side, and the number of samples on which the "
        "run had trained before this step",
        examples=[[(84, 2_688), (599, 19_168)]],
    )


class Difference(BaseModel):
    """Difference of one side from the first side.

    `low` and `high` bound the 95 % confidence interval of `value`; null: unknown.
    """

    value: float = Field(
        description="value of the side minus value of the first side", examples=[-0.15]
    )
    low: float | None = Field(examples=[-0.16])
    high: float | None = Field(examples=[-0.14])
    ratio: float | None = Field(
        description="value of the side ÷ value of the first side − 1; null: unknown",
        examples=[-0.25],
    )
    known: bool = Field(
        description="true: the difference's confidence interval is known and excludes zero"
    )
    better: bool | None = Field(
        description="true: the side is better than the first side; false: it is worse; null: "
        "neither, or unknown"
    )


class ComparedTarget(BaseModel):
    """Target of a compared run: the value that one of its metrics should reach."""

    metric: str = Field(examples=["accuracy"])
    value: float = Field(examples=[0.9])
    direction: Direction = Field(examples=[">="])
    source: Source = Field(
        description="source of the values that are compared with the target: `evaluations`, or "
        "`training` for means of the training loss over 100 steps"
    )


class ComparedFigure(BaseModel):
    """One quantity for all sides, and its differences between the sides."""

    figure: str = Field(
        description="name of the figure. If `metric` is set: the `last`, `best`, `least` or "
        "`greatest` value of the metric. If `target` is set: `after_s`, `epoch` or `trained` at "
        "the moment when the target was met. For a cost: `cost`, or `waited_cost` for the time "
        "that ranks waited for slower ranks. Otherwise: a metric of steps",
        examples=["step_s"],
    )
    unit: str = Field(description="unit of the figure; for a cost, its currency", examples=["s"])
    metric: str | None = Field(
        default=None,
        description="metric of evaluations to which the figure belongs; null: none",
        examples=[None],
    )
    target: ComparedTarget | None = Field(
        default=None,
        description="target to which the figure belongs; null: none",
        examples=[None],
    )
    values: list[float | None] = Field(
        description="value of the figure for each side; null: unknown", examples=[[0.6, 0.45]]
    )
    changes: list[Difference | None] = Field(
        description="for each further side, its difference from the first side; null: unknown"
    )


class Comparison(BaseModel):
    """Comparison of runs, or of parts of runs."""

    sides: list[ComparedSide]
    differences: list[ComparedFigure]
    words: list[str] = Field(
        description="for each further side, a sentence about its step time compared with the first "
        "side",
        examples=[["B takes 25.4 % ± 0.8 less time per step."]],
    )


@router.get(
    "/compare",
    response_model=Comparison,
    responses=documented(
        HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE
    ),
    dependencies=[Depends(VIEWER)],
)
def get_comparison(
    request: Request,
    side: Annotated[
        list[str],
        Query(
            min_length=2,
            max_length=6,
            description="id of a run; with `:100-499` appended, only steps 100 to 499 of the run; "
            "with `@1` appended, only the steps of policy version 1, without the first 20",
            examples=[["3f9a1c07be52@0", "3f9a1c07be52@1"]],
        ),
    ],
) -> Any:
    """Return figures of each side, and the differences between the first side and the others."""
    with store_of(request).read() as connection:
        try:
            sides = [compare.read(connection, text) for text in side]
        except InputError as error:
            raise InvalidRequestError("side", str(error)) from error
    rows = compare.differences(sides)
    results = compare.results(store_of(request), sides, settings_of(request).hour_price)
    return {
        "sides": [_shown(each) for each in sides],
        "differences": [*rows, *results],
        "words": compare.words(sides, rows),
    }


def _shown(side: compare.Side) -> dict[str, Any]:
    count = len(side.steps)
    return {
        "side": side.text,
        "run": side.run,
        "name": side.name,
        "policy": side.policy,
        "version": side.version,
        "from": int(side.steps[0]) if count else None,
        "to": int(side.steps[-1]) if count else None,
        "steps": count,
        "trained": compare.trained_at(side),
    }
