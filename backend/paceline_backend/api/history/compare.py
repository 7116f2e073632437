"""REST: comparison of runs, or of parts of runs."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from paceline.core.errors import InputError
from paceline_backend.api.errors import documented
from paceline_backend.api.history.models import Comparison
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.insight import compare
from paceline_backend.requests import InvalidRequestError

router = APIRouter()


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
            description="id of a run; with `:100-499`: only these steps; with `@1`: only the "
            "steps of this policy version, without the first 20",
            examples=[["3f9a1c07be52@0", "3f9a1c07be52@1"]],
        ),
    ],
) -> Any:
    """Return metrics of each side, and the differences between the first side and the others."""
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
