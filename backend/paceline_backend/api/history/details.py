"""REST: all that is stored about one run, and its verdicts over time."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Path, Query, Request

from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.history import models
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.telemetry import Ranks, Steps, ranks_of
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.whatif.answer import Forecast, kept
from paceline_backend.store import Connection, attempts, reads
from paceline_backend.store import runs as runs_store
from paceline_backend.store.details import epochs, samples
from paceline_backend.store.outcomes import forecasts

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

_BIGGEST = 2**63 - 1


@router.get("/epochs", response_model=list[models.EpochSummary])
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


@router.get("/epochs/{epoch}/workers", response_model=list[models.EpochWorker])
def list_epoch_workers(
    request: Request,
    run: str,
    epoch: Annotated[int, Path(ge=0, le=2**31 - 1, description="counted from 0")],
) -> Any:
    """List the workers of an epoch, by rank; empty: none of its steps is complete."""
    with store_of(request).read() as connection:
        return epochs.workers(connection, runs_store.key_of(connection, run), epoch)


@router.get("/samples", response_model=models.Assignments)
def list_samples(
    request: Request,
    run: str,
    steps: Steps,
    ranks: Ranks = None,
    sample: Annotated[
        int | None,
        Query(ge=0, le=_BIGGEST, description="only steps and ranks that got this sample"),
    ] = None,
    limit: Annotated[
        int, Query(ge=1, le=10_000, description="maximum number of items; a step is never cut")
    ] = 1_000,
) -> Any:
    """List which samples each rank got, by step and rank, from the plans that ran."""
    with store_of(request).read() as connection:
        key = runs_store.key_of(connection, run)
        items, following = samples.assigned(
            connection, key, steps.span, ranks_of(ranks), sample, limit
        )
    return {"items": items, "next_from": following}


@router.get("/devices", response_model=models.RunDevices)
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


@router.get("/forecasts", response_model=list[models.PastForecast])
def list_forecasts(
    request: Request,
    run: str,
    decided: Annotated[
        bool, Query(description="only forecasts on which `auto` based a decision")
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


@router.get("/verdicts", response_model=models.Verdicts)
def list_verdicts(
    request: Request,
    run: str,
    steps: Steps,
    parts: Annotated[int, Query(ge=1, le=20, description="number of equal parts of the range")] = 8,
) -> Any:
    """List verdicts about a run over time. The range is cut into parts, each with its own verdict.

    If a part is longer than a verdict can cover, only its newest steps are evaluated.
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
