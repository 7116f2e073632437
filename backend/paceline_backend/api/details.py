"""REST: stored data of one run: epochs, samples, devices, forecasts and verdicts."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request
from pydantic import BaseModel, Field

from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.evidence import RunVerdict
from paceline_backend.api.forecasts import AutoDecision
from paceline_backend.api.queries import BIGGEST, Ranks, Steps, ranks_of
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import store_of
from paceline_backend.api.telemetry import DeviceInfo
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.whatif.answer import (
    Forecast,
    LeftOut,
    NodeForecast,
    PolicyInForce,
    PresetForecast,
    kept,
)
from paceline_backend.store import Connection, attempts, reads
from paceline_backend.store import runs as runs_store
from paceline_backend.store.details import epochs, samples
from paceline_backend.store.outcomes import forecasts

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])


class EpochSummary(BaseModel):
    """Sums and means over the complete steps of an epoch."""

    epoch: int = Field(examples=[1])
    first_step: int = Field(examples=[300])
    last_step: int = Field(examples=[599])
    steps: int = Field(examples=[300])
    samples: int = Field(examples=[19_200])
    wall_s: float = Field(description="sum of the step times in seconds", examples=[90.0])
    first_ended_at: float = Field(
        description="Unix time at which the first step of the epoch ended", examples=[1767225700.0]
    )
    ended_at: float = Field(
        description="Unix time at which the last step of the epoch ended", examples=[1767225790.0]
    )
    step_s: float = Field(examples=[0.3])
    se: float | None = Field(examples=[0.1])
    waste: float | None = Field(examples=[0.06])
    dif: float | None = Field(examples=[120.0])
    ett_error: float | None = Field(examples=[0.02])
    comm_s: float | None = Field(examples=[0.05])
    loss: float | None = Field(examples=[1.2])


class EpochWorker(BaseModel):
    """Sums over a worker's complete steps in an epoch."""

    rank: int = Field(examples=[3])
    steps: int = Field(
        description="number of complete steps that the worker reported", examples=[300]
    )
    samples: int = Field(examples=[4_800])
    load: float = Field(examples=[1_536_000.0])
    share: float = Field(
        description="load of the worker ÷ load of all workers, in the epoch", examples=[0.25]
    )
    dif: float | None = Field(
        description="sample standard deviation of the sizes of the worker's samples; null: unknown",
        examples=[96.5],
    )
    ett_s: float | None = Field(
        description="sum of the estimated compute times (ETT) in seconds; null: no step has an "
        "estimate",
        examples=[58.1],
    )
    compute_s: float = Field(
        description="sum of the measured compute times (T) in seconds", examples=[57.0]
    )
    ett_error: float | None = Field(
        description="|Σ ETT − Σ T| ÷ Σ T, for the estimated (ETT) and the measured compute times "
        "(T) of the steps that have an estimate; null: no step has one",
        examples=[0.02],
    )
    data_s: float = Field(
        description="seconds that the worker waited for its data loader", examples=[0.3]
    )
    wait_s: float = Field(
        description="seconds that the worker waited for slower ranks", examples=[6.2]
    )
    wall_s: float = Field(description="sum of the worker's step times in seconds", examples=[90.0])
    waste: float | None = Field(
        description="share of the worker's time that it waited for slower ranks: `wait_s` ÷ "
        "`wall_s`; null: unknown",
        examples=[0.07],
    )
    slowest_share: float = Field(
        description="share of the steps in which no other worker computed longer", examples=[0.1]
    )
    came: int | None = Field(
        description="number of the worker's samples that another worker had in the previous "
        "epoch; null: unknown",
        examples=[1_204],
    )
    came_load: float | None = Field(
        description="load of the worker's samples that another worker had in the previous epoch; "
        "null: unknown",
        examples=[385_280.0],
    )
    went: int | None = Field(
        description="number of the worker's samples of the previous epoch that another worker has "
        "in this epoch; null: unknown",
        examples=[1_204],
    )
    went_load: float | None = Field(
        description="load of the worker's samples of the previous epoch that another worker has in "
        "this epoch; null: unknown",
        examples=[385_280.0],
    )


class Assigned(BaseModel):
    """The samples that a rank got in a step."""

    step: int = Field(examples=[12])
    epoch: int = Field(examples=[0])
    attempt: int = Field(examples=[0])
    rank: int = Field(examples=[3])
    samples: list[int] = Field(
        description="indices of the samples in the data set; for a stream, which has no indices, "
        "numbers that count the samples of the epoch",
        examples=[[17, 4, 91]],
    )


class Assignments(BaseModel):
    """Samples that each rank got, by step and rank."""

    items: list[Assigned]
    next_from: int | None = Field(
        description="`from` for the next page; null: this is the last page", examples=[None]
    )


class PlacedRank(BaseModel):
    """Node and device of a rank."""

    rank: int = Field(examples=[0])
    node: str | None = Field(description="node of the rank; null: unknown", examples=["node-1"])
    limit: int | None = Field(
        description="number of samples that fit into the rank's device memory; null: unknown",
        examples=[64],
    )
    profile: list[tuple[int, float]] = Field(
        description="pair for each trial step of the rank: number of samples, and seconds; empty: "
        "no trial steps",
        examples=[[[8, 0.1], [16, 0.18]]],
    )
    device: DeviceInfo | None = Field(description="device of the rank; null: unknown")


class RunDevices(BaseModel):
    """Ranks and their devices, as the leader of the latest attempt reported them."""

    attempt: int | None = Field(
        description="latest attempt whose leader has reported; null: none yet", examples=[0]
    )
    device: str | None = Field(examples=["NVIDIA H100"])
    emulated: dict[str, Any] | None = Field(
        description="emulated device speeds of the ranks; null: not emulated", examples=[None]
    )
    paceline: str | None = Field(
        description="Paceline version of the ranks; null: unknown", examples=["0.1.0"]
    )
    torch: str | None = Field(examples=["2.8.0"])
    ranks: list[PlacedRank]


class PastForecast(BaseModel):
    """A stored forecast, and the decision of `auto` about it."""

    made_at: float = Field(
        description="Unix time at which the forecast was made", examples=[1767225700.0]
    )
    step: int | None = Field(
        description="last step that the forecast is based on; null: none", examples=[263]
    )
    first_step: int | None = Field(examples=[8])
    steps: int = Field(examples=[256])
    current: PolicyInForce
    fit_error: float | None = Field(examples=[0.01])
    forecasts: list[PresetForecast]
    left_out: list[LeftOut]
    slow_node: NodeForecast | None
    option: str | None = Field(
        description="`label` of the preset whose earlier forecast this forecast checks; null: "
        "the forecast covers all presets"
    )
    decision: AutoDecision | None = Field(
        description="decision of `auto` about the forecast; null: none"
    )


class Verdicts(BaseModel):
    """Verdicts about consecutive parts of a run."""

    items: list[RunVerdict]


@router.get("/epochs", response_model=list[EpochSummary])
def list_epochs(
    request: Request,
    run: str,
    limit: Annotated[
        int, Query(ge=1, le=10_000, description="maximum number of epochs; the newest are returned")
    ] = 1_000,
) -> Any:
    """List the epochs of a run with sums and means, oldest first."""
    with store_of(request).read() as connection:
        return epochs.epochs(connection, runs_store.key_of(connection, run), limit)


@router.get("/epochs/{epoch}/workers", response_model=list[EpochWorker])
def list_epoch_workers(
    request: Request,
    run: str,
    epoch: Annotated[int, Path(ge=0, le=2**31 - 1, description="number of the epoch, from 0")],
) -> Any:
    """List the workers of an epoch by rank, with sums over the epoch's complete steps.

    The list is empty while no step of the epoch is complete.
    """
    with store_of(request).read() as connection:
        return epochs.workers(connection, runs_store.key_of(connection, run), epoch)


@router.get("/samples", response_model=Assignments)
def list_samples(
    request: Request,
    run: str,
    steps: Steps,
    ranks: Ranks = None,
    sample: Annotated[
        int | None,
        Query(ge=0, le=BIGGEST, description="index of a sample: only steps and ranks that got it"),
    ] = None,
    limit: Annotated[
        int,
        Query(
            ge=1,
            le=10_000,
            description="maximum number of items, exceeded only to complete the last step",
        ),
    ] = 1_000,
) -> Any:
    """List which samples each rank got, by step and rank, from the plans that ran."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        items, following = samples.assigned(
            connection, key, steps.span, ranks_of(ranks), sample, limit
        )
    return {"items": items, "next_from": following}


@router.get("/devices", response_model=RunDevices)
def get_devices(request: Request, run: str) -> Any:
    """Return ranks and their devices, as the leader of the latest attempt reported them."""
    with store_of(request).read() as connection:
        hello = runs_store.hello(connection, runs_store.key_of(connection, run))
    if hello is None:
        names = ("attempt", "device", "emulated", "paceline", "torch")
        return {**dict.fromkeys(names), "ranks": []}
    devices = msgspec.to_builtins(hello.devices)
    ranks = [
        {
            "rank": rank,
            "node": hello.placement[rank] if rank < len(hello.placement) else None,
            "limit": hello.limits[rank] if rank < len(hello.limits) else None,
            "profile": hello.profiles[rank] if rank < len(hello.profiles) else [],
            "device": devices[rank] if rank < len(devices) else None,
        }
        for rank in range(hello.world)
    ]
    return {
        "attempt": hello.attempt,
        "device": hello.device,
        "emulated": hello.emulated,
        "paceline": hello.paceline,
        "torch": hello.torch,
        "ranks": ranks,
    }


@router.get("/forecasts", response_model=list[PastForecast])
def list_forecasts(
    request: Request,
    run: str,
    decided: Annotated[
        bool, Query(description="true: only forecasts about which `auto` has decided")
    ] = False,
) -> Any:
    """List the stored forecasts, oldest first: the newest 50, and all that led to a switch."""
    with store_of(request).read() as connection:
        bodies = forecasts.bodies(connection, runs_store.key_of(connection, run))
    made = [forecast for forecast in kept(bodies) if forecast.decision or not decided]
    return [_past(forecast) for forecast in made]


def _past(forecast: Forecast) -> dict[str, Any]:
    body: dict[str, Any] = msgspec.to_builtins(forecast)
    decision = body["decision"] and {**body["decision"], "at": body["made_at"]}
    return {**body, "decision": decision}


@router.get("/verdicts", response_model=Verdicts)
def list_verdicts(
    request: Request,
    run: str,
    steps: Steps,
    parts: Annotated[
        int,
        Query(ge=1, le=20, description="number of equal parts into which the range is divided"),
    ] = 8,
) -> Any:
    """List verdicts about a run over time: one for each of several equal parts of the range.

    If a part is longer than a verdict can cover, only the newest steps of the part are judged.
    """
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        begin, end = reads.complete_bounds(connection, key, steps.span)
    if begin is None or end is None:
        return {"items": []}
    size = -(-(end - begin + 1) // parts)
    items = []
    for at in range(begin, end + 1, size):
        with store_of(request).read() as connection:
            items.append(_verdict(connection, key, (at, min(end, at + size - 1))))
    return {"items": items}


def _verdict(connection: Connection, key: int, span: tuple[int, int]) -> dict[str, Any]:
    placement = attempts.placement(connection, key, span[1])
    seen = verdicts.read_observed(connection, key, span, placement)
    return verdicts.facts_of(verdicts.judge(seen))
