"""REST: the verdict over all active runs, the slow nodes of each day, and the cost of waiting."""

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
    step: int | None = Field(
        description="number of the newest complete step; null: none", examples=[1703]
    )
    workers: int = Field(examples=[8])
    at: float | None = Field(
        description="Unix time at which the verdict about the run was made; null: no verdict yet",
        examples=[1767225600],
    )
    level: str = Field(
        description="severity in the newest steps: healthy, watch (a warning), held-up (slowed "
        "down), or unknown (no verdict)",
        examples=["held-up"],
    )
    what: str = Field(
        description="clause that describes the run in its newest steps, for example its first "
        "cause; empty: no verdict",
        examples=["rank 3 on vm-3 computes 2.7 × slower since step 1,204"],
    )
    waste: float = Field(
        description="share of the workers' time in the newest steps that is spent waiting for "
        "slower workers",
        examples=[0.41],
    )
    share: float = Field(
        description="share of the newest steps' wall time that active causes cost", examples=[0.26]
    )
    lost_workers: float = Field(
        description="worker-hours that active causes cost per hour: `share` × `workers`",
        examples=[2.1],
    )
    waited_hours: float = Field(
        description="hours that workers have waited so far, summed over the workers",
        examples=[3.1],
    )
    cost: float = Field(
        description="cost of the workers' time so far; 0: no price is set, or the run is simulated",
        examples=[31.0],
    )
    waited_cost: float = Field(
        description="cost of the time that workers have waited so far; 0: no price is set, or the "
        "run is simulated",
        examples=[7.75],
    )
    hung_s: float = Field(
        description="seconds for which the run has hung; 0: the run does not hang", examples=[0]
    )
    coasting: bool = Field(
        description="true: the leader planned the newest segment itself, not a controller"
    )
    causes: list[Cause]


class FleetWait(BaseModel):
    """Runs that are slowed down by active causes of one kind."""

    kind: str = Field(description="kind of the causes that slow the runs down", examples=["node"])
    runs: list[str] = Field(examples=[["3f9a1c07be52"]])
    lost_workers: float = Field(
        description="worker-hours that the causes cost per hour", examples=[2.1]
    )


class FleetNodeRun(BaseModel):
    """A run that a node slows down."""

    run: str = Field(examples=["3f9a1c07be52"])
    ranks: list[int] = Field(
        description="ranks of the run that are slow on this node", examples=[[3]]
    )
    kinds: list[str] = Field(
        description="kinds of the causes for which ranks on the node are responsible",
        examples=[["node"]],
    )
    factor: float | None = Field(
        description="largest slowdown factor of the ranks on the node; null: unknown",
        examples=[2.7],
    )


class FleetNode(BaseModel):
    """A node that currently slows runs down."""

    node: str = Field(examples=["vm-3"])
    lost_workers: float = Field(
        description="worker-hours that slow ranks on the node cost per hour", examples=[2.1]
    )
    runs: list[FleetNodeRun]


class FleetVerdict(BaseModel):
    """Summary of how much all training runs are slowed down."""

    words: str = Field(
        examples=["1 of 3 runs on 24 workers is slowed down; 2.1 workers are lost …"]
    )
    workers: int = Field(examples=[24])
    waiting_workers: float = Field(
        description="mean number of workers that wait at any time, in the newest steps",
        examples=[3.4],
    )
    lost_workers: float = Field(
        description="worker-hours that active causes cost per hour", examples=[2.1]
    )
    waited_hours: float = Field(
        description="hours that workers of the active runs have waited so far, summed over the "
        "workers",
        examples=[5.2],
    )
    waited_cost: float = Field(
        description="cost of the time that workers of the active runs have waited so far",
        examples=[13.0],
    )
    currency: str | None = Field(
        description="currency of all costs; null: no price is set, so all costs are 0",
        examples=["EUR"],
    )
    runs: list[FleetRun] = Field(description="active runs, sorted by `lost_workers`, largest first")
    waits: list[FleetWait] = Field(
        description="causes of waiting that are present now, one row for each kind, sorted by "
        "`lost_workers`, largest first"
    )
    nodes: list[FleetNode] = Field(
        description="nodes that slow runs down, sorted by `lost_workers`, largest first"
    )


class WaitingGroup(BaseModel):
    """The runs of one owner, the runs with one tag, or one run."""

    key: str | None = Field(
        description="owner, tag or run id of the group; empty: no owner or tag is known; null: all "
        "groups that are not listed individually",
        examples=["ada"],
    )
    name: str = Field(examples=["ada"])
    runs: int = Field(examples=[3])
    worker_hours: float = Field(
        description="hours of all ranks of the group's runs, summed over the ranks", examples=[960]
    )
    waited_hours: float = Field(
        description="hours that ranks of the group's runs waited for slower ranks, summed over the "
        "ranks",
        examples=[84.2],
    )
    cost: float = Field(
        description="cost of the time of all ranks of the group's runs", examples=[2400.0]
    )
    waited_cost: float = Field(
        description="cost of the time that ranks of the group's runs waited for slower ranks",
        examples=[210.5],
    )


class NodeCordon(BaseModel):
    """Cordon of a node: who set it, when, and why."""

    by: str = Field(examples=["ada"])
    at: float = Field(examples=[1767225600])
    reason: str = Field(examples=["its disk is slow"])


class NodeRecord(BaseModel):
    """State of a node, and on which days it slowed runs down."""

    node: str = Field(examples=["vm-3"])
    alive: bool
    runs: list[str] = Field(
        description="runs that currently train on this node", examples=[["3f9a1c07be52"]]
    )
    cordoned: NodeCordon | None = Field(
        description="cordon of the node; null: not cordoned", examples=[None]
    )
    hours: list[float] = Field(
        description="for each day, the hours in which a verdict named the node as slow",
        examples=[[0, 2.5]],
    )


class Fleet(BaseModel):
    """Nodes that slowed runs down, by day, and the cost of waiting."""

    first_day: float = Field(
        description="Unix time at which the first of the requested days begins (UTC)"
    )
    currency: str | None = Field(
        description="currency of all costs; null: no price is set, so all costs are 0",
        examples=["EUR"],
    )
    groups: list[WaitingGroup] = Field(
        description="groups of runs, sorted by `waited_hours`, largest first"
    )
    nodes: list[NodeRecord] = Field(
        description="all nodes, sorted by the sum of `hours`, largest first"
    )


@router.get("/verdict", response_model=FleetVerdict)
def get_fleet_verdict(request: Request) -> Any:
    """Return the verdict over all runs that train: lost time, its causes, and the slow nodes."""
    with store_of(request).read() as connection:
        return fleet.overview(connection, settings_of(request).hour_price)


@router.get(
    "/fleet",
    response_model=Fleet,
    responses=documented(HTTPStatus.UNPROCESSABLE_ENTITY),
)
def get_fleet(
    request: Request,
    days: Annotated[
        int, Query(ge=1, le=366, description="number of days up to and including today (UTC)")
    ] = 28,
    by: Annotated[By, Query(description="how runs are grouped: by owner, tag or run")] = "owner",
) -> Any:
    """Return the daily hours in which nodes were slow, their cordons, and the cost of waiting."""
    price = settings_of(request).hour_price
    with store_of(request).read() as connection:
        return fleet.record(connection, days, by, time.time(), price)
