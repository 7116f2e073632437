"""REST: sums over runs, grouped by day, node, policy, tag and so on."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from paceline_backend.api.errors import documented
from paceline_backend.api.history.filters import Filter, Moment
from paceline_backend.api.history.models import Aggregate
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.insight import history

router = APIRouter()


@router.get(
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
    from_day: Moment = None,
    to_day: Moment = None,
) -> Any:
    """Return sums and means over the steps of runs, by group.

    `from_day` and `to_day` select days (UTC): from the day of the first moment up to the day of the
    second, both included.
    """
    groups, price = tuple(dict.fromkeys(by)), settings_of(request).hour_price
    with store_of(request).read() as connection:
        return history.aggregates(connection, which, groups, from_day, to_day, price)
