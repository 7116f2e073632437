"""REST: the verdict over all runs, nodes by day, and the cost of waiting."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, Field

from paceline_backend.api.errors import documented
from paceline_backend.api.evidence import Cause
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import settings_of, store_of
from paceline_backend.insight import fleet
from paceline_backend.insight.fleet import By

router = APIRouter(
    responses=documented(HTTPStatus.SERVICE_UNAVAILABLE), dependencies=[Depends(VIEWER)]
)


class FleetRun(BaseModel):
    """A run that trains, with its current verdict and cost."""

    run: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    policy: str = Field(examples=["bsp"])
    step: int | None = Field(description="newest complete step", examples=[1703])
    workers: int = Field(examples=[8])
    at: float | None = Field(
        description="Unix time of the run's verdict; null: no verdict yet", examples=[1767225600]
    )
    level: str = Field(description="healthy, watch, held-up or unknown", examples=["held-up"])
    what: str = Field(
        description="the first cause as a clause; empty: unknown",
        examples=["rank 3 on vm-3 computes 2.7 × slower since step 1,204"],
    )
    waste: float = Field(
        description="share of the workers' time that is currently spent waiting", examples=[0.41]
    )
    share: float = Field(
        description="share of the wall time that is currently lost to causes", examples=[0.26]
    )
    lost_workers: float = Field(
        description="`share` × `workers`: worker-hours lost per hour", examples=[2.1]
    )
    waited_hours: float = Field(description="worker-hours spent waiting so far", examples=[3.1])
    cost: float = Field(description="cost of all time of the ranks so far", examples=[31.0])
    waited_cost: float = Field(description="cost of the waiting so far", examples=[7.75])
    hung_s: float = Field(
        description="seconds without progress of any rank; 0: the run does not hang", examples=[0]
    )
    coasting: bool = Field(description="whether the leader planned the newest segment itself")
    causes: list[Cause]


class FleetWait(BaseModel):
    """Runs that wait because of one kind of cause."""

    kind: str = Field(description="kind of active causes", examples=["node"])
    runs: list[str] = Field(examples=[["3f9a1c07be52"]])
    lost_workers: float = Field(examples=[2.1])


class FleetNodeRun(BaseModel):
    """A run that a node slows down."""

    run: str = Field(examples=["3f9a1c07be52"])
    ranks: list[int] = Field(
        description="ranks of the run that are slow on this node", examples=[[3]]
    )
    kinds: list[str] = Field(description="kind of active causes", examples=[["node"]])
    factor: float | None = Field(description="factor of the slowest rank", examples=[2.7])


class FleetNode(BaseModel):
    """A node that currently slows runs down."""

    node: str = Field(examples=["vm-3"])
    lost_workers: float = Field(examples=[2.1])
    runs: list[FleetNodeRun]


class FleetVerdict(BaseModel):
    """The verdict over the runs that train."""

    words: str = Field(
        examples=["1 of 3 runs on 24 workers is slowed down; 2.1 workers are lost …"]
    )
    workers: int = Field(examples=[24])
    waiting_workers: float = Field(
        description="number of these workers that currently wait, on average", examples=[3.4]
    )
    lost_workers: float = Field(description="worker-hours lost to causes per hour", examples=[2.1])
    waited_hours: float = Field(
        description="worker-hours that these runs have spent waiting so far", examples=[5.2]
    )
    waited_cost: float = Field(description="cost of that waiting", examples=[13.0])
    currency: str | None = Field(
        description="currency of all costs; null: no price is set, and all costs are 0",
        examples=["EUR"],
    )
    runs: list[FleetRun] = Field(description="largest loss first")
    waits: list[FleetWait] = Field(description="largest loss first")
    nodes: list[FleetNode] = Field(description="largest loss first")


class WaitingGroup(BaseModel):
    """The runs of one owner, the runs with one tag, or one run."""

    key: str | None = Field(
        description="owner, tag or run id; empty: unknown; null: all other groups",
        examples=["ada"],
    )
    name: str = Field(examples=["ada"])
    runs: int = Field(examples=[3])
    worker_hours: float = Field(
        description="worker-hours of all ranks of these runs", examples=[960]
    )
    waited_hours: float = Field(description="of these, spent waiting", examples=[84.2])
    cost: float = Field(description="cost of all worker-hours", examples=[2400.0])
    waited_cost: float = Field(description="cost of the waiting", examples=[210.5])


class NodeCordon(BaseModel):
    """Cordon of a node: who set it, when, and why."""

    by: str = Field(examples=["ada"])
    at: float = Field(examples=[1767225600])
    reason: str = Field(examples=["its disk is slow"])


class NodeRecord(BaseModel):
    """A node over several days."""

    node: str = Field(examples=["vm-3"])
    alive: bool
    runs: list[str] = Field(
        description="runs that currently train on this node", examples=[["3f9a1c07be52"]]
    )
    cordoned: NodeCordon | None = Field(examples=[None])
    hours: list[float] = Field(
        description="for each day: hours in which a verdict named the node", examples=[[0, 2.5]]
    )


class Fleet(BaseModel):
    """Nodes by day, and the cost of waiting."""

    first_day: float = Field(description="Unix time at which the first day begins (UTC)")
    currency: str | None = Field(
        description="currency of all costs; null: no price is set, and all costs are 0",
        examples=["EUR"],
    )
    groups: list[WaitingGroup] = Field(description="groups with the most waiting first")
    nodes: list[NodeRecord] = Field(description="nodes that slowed runs down most first")


@router.get("/verdict", response_model=FleetVerdict)
def get_fleet_verdict(request: Request) -> Any:
    """Return the verdict over the runs that train: lost time, causes and slow nodes."""
    with store_of(request).read() as connection:
        return fleet.overview(connection, settings_of(request).hour_price)


@router.get(
    "/fleet",
    response_model=Fleet,
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
