"""REST: the verdict over all runs, nodes by day, and the cost of waiting."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request

from paceline_backend.api.errors import documented
from paceline_backend.api.fleet import models
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import settings_of, store_of
from paceline_backend.insight import fleet
from paceline_backend.insight.fleet import By

router = APIRouter(
    responses=documented(HTTPStatus.SERVICE_UNAVAILABLE), dependencies=[Depends(VIEWER)]
)


@router.get("/verdict", response_model=models.FleetVerdict)
def get_fleet_verdict(request: Request) -> Any:
    """Return the verdict over the runs that train: lost time, causes and slow nodes."""
    with store_of(request).read() as connection:
        return fleet.overview(connection, settings_of(request).hour_price)


@router.get(
    "/fleet",
    response_model=models.Fleet,
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY),
)
def get_fleet(
    request: Request,
    days: Annotated[int, Query(ge=1, le=366, description="number of days until today (UTC)")] = 28,
    by: Annotated[By, Query(description="how the cost is grouped")] = "owner",
) -> Any:
    """Return nodes by day, cordons with their reasons, and the cost of waiting."""
    price = settings_of(request).hour_price
    with store_of(request).read() as connection:
        return fleet.record(connection, days, by, time.time(), price)
