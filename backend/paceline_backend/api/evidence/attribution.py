"""REST: attribution, i.e. which ranks are slow, and for which cause."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.evidence.verdict import judged
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import reused_of, store_of
from paceline_backend.api.telemetry import Points, Steps
from paceline_backend.insight import replacements
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.attribution import (
    CAUSES,
    Attribution,
    attribute,
    read_rows,
)
from paceline_backend.insight.verdict import SlowNode, TimeLoss, Verdict, slow_node, throttled
from paceline_backend.insight.whatif.answer import Saving
from paceline_backend.policies.base import Floats, Ints
from paceline_backend.store import runs
from paceline_backend.store.nodes import states_of_gpus
from paceline_backend.store.reads import Range, bucket_of

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])


class Shares(BaseModel):
    """Fraction of the SP of all steps for each cause. They add up to 1, or are all 0."""

    data: float = Field(description="uneven loads of the batches", examples=[0.1])
    node: float = Field(description="lasting differences in speed", examples=[0.8])
    transient: float = Field(description="the rest: temporary slowness and noise", examples=[0.1])
    input: float = Field(description="slow data loading", examples=[0.0])


class AttributedWorker(BaseModel):
    """A rank over the range of steps. `data`, `node`, `transient`, `input` add up to `caused`."""

    rank: int = Field(examples=[3])
    on_node: str | None = Field(description="node of the rank; null: unknown", examples=["n2"])
    cause: str = Field(
        description="kind of the first cause in the verdict that names the rank, or none",
        examples=["node"],
    )
    factor: float | None = Field(
        description="time at equal load ÷ the median rank's; null: too few steps", examples=[2.1]
    )
    slow_steps: list[tuple[int, int]] = Field(
        description="first and last step of each span in which the rank was temporarily slow",
        examples=[[]],
    )
    caused: float = Field(
        description="share of all waiting that is due to this rank", examples=[0.78]
    )
    data: float = Field(examples=[0.0])
    node: float = Field(examples=[0.75])
    transient: float = Field(examples=[0.03])
    input: float = Field(examples=[0.0])
    hidden: float = Field(
        description="seconds per step by which the rank would be slower with an equal share of "
        "the load",
        examples=[0.0],
    )
    words: str = Field(examples=["Rank 3 computes 2.1× slower than the median at equal load."])


class AttributionOverTime(BaseModel):
    """SP per step and cause, in seconds; means over `bucket` steps."""

    bucket: int = Field(description="steps per point", examples=[1])
    step: list[int] = Field(description="first step of each bucket", examples=[[0, 1]])
    data: list[float] = Field(examples=[[0.0, 0.01]])
    node: list[float] = Field(examples=[[0.1, 0.1]])
    transient: list[float] = Field(examples=[[0.01, 0.02]])
    input: list[float] = Field(examples=[[0.0, 0.0]])


class RunAttribution(BaseModel):
    """Reasons why the ranks of a run wait for each other."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(alias="from", description="first step", examples=[0])
    to: int | None = Field(description="last step", examples=[99])
    steps: int = Field(
        description="number of steps in which at least two ranks had samples", examples=[100]
    )
    se: float = Field(description="SE of the times at which ranks are ready", examples=[0.9])
    sp_s: float = Field(description="SP of the same times, seconds per step", examples=[0.11])
    waste: float = Field(description="share of the ranks' time spent waiting", examples=[0.4])
    shares: Shares
    cause: str = Field(
        description="the kind of the verdict's first cause, or none", examples=["node"]
    )
    ranks: list[int] = Field(description="ranks that this cause names, ascending", examples=[[3]])
    node: str | None = Field(
        description="node of all slow ranks; null: no rank is slow, slow ranks are on several "
        "nodes, or there is only one node",
        examples=["n2"],
    )
    factor: float | None = Field(
        description="time of that node's slow ranks ÷ the other nodes', at equal load",
        examples=[2.1],
    )
    saving: Saving | None = Field(
        description="forecast if that node were as fast as the others; null: no forecast yet"
    )
    words: str = Field(examples=["Rank 3 computes 2.1× slower than the median at equal load."])
    workers: list[AttributedWorker]
    over_time: AttributionOverTime


@router.get("/attribution", response_model=RunAttribution)
def get_attribution(request: Request, run: str, steps: Steps, points: Points = 200) -> Any:
    """Return why ranks wait, by default in the newest 100 steps."""
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
    asked = ("attribution", key, steps.span, points)
    return reused_of(request).get(asked, lambda: _attributed(request, key, steps.span, points))


def _attributed(request: Request, run: int, span: Range, points: int) -> dict[str, Any]:
    seen, verdict, placement = judged(request, run, span)
    # The verdict may be some seconds old: leave out the steps that have completed since.
    if len(seen.step):
        span = (span[0], int(seen.step[-1]))
    with store_of(request).read() as connection:
        rows = read_rows(connection, run, span, placement)
    # This takes a while, so no database connection is held during the call.
    result = attribute(rows)
    nodes = None if placement is None else placement.nodes
    slow, forecast, gpus = slow_node(verdict), None, []
    if slow is not None and placement is not None:
        with store_of(request).read() as connection:
            forecast = replacements.forecast_of(connection, run, slow.node, placement.since)
            gpus = states_of_gpus(connection, slow.node)
    return _answer(result, verdict, points, nodes, slow, gpus) | {"saving": forecast}


def _answer(
    attribution: Attribution,
    verdict: Verdict,
    points: int,
    nodes: Sequence[str] | None,
    slow: SlowNode | None,
    gpus: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    step = attribution.step
    cause = verdict.causes[0] if verdict.causes else None
    of_node = [] if slow is None else [slow.words, *throttled(gpus)]
    return {
        "from": int(step[0]) if len(step) else None,
        "to": int(step[-1]) if len(step) else None,
        "steps": len(step),
        "se": attribution.se,
        "sp_s": float(attribution.sp_s.mean()) if len(step) else 0.0,
        "waste": attribution.waste,
        "shares": attribution.shares,
        "cause": _kind(cause),
        "ranks": list(cause.ranks) if cause else [],
        "node": None if slow is None else slow.node,
        "factor": None if slow is None else slow.factor,
        "words": " ".join([*of_node, verdicts.words(verdict)]),
        "workers": [
            {
                **vars(worker),
                "on_node": _at(nodes, worker.rank),
                "cause": _kind(verdicts.cause_of(verdict, worker.rank)),
                "words": verdicts.rank_words(verdict, worker.rank, worker.factor),
            }
            for worker in attribution.workers
        ],
        "over_time": _over_time(step, attribution.parts, points),
    }


def _kind(cause: TimeLoss | None) -> str:
    return "none" if cause is None else cause.kind


def _at(nodes: Sequence[str] | None, rank: int) -> str | None:
    return nodes[rank] if nodes is not None and rank < len(nodes) else None


def _over_time(step: Ints, parts: Any, points: int) -> dict[str, Any]:
    if not len(step):
        return {"bucket": 1, "step": [], **{name: [] for name in CAUSES}}
    bucket = bucket_of(int(step[0]), int(step[-1]), points)
    starts = np.flatnonzero(np.diff(step // bucket, prepend=-1))
    counts = np.diff(np.append(starts, len(step)))
    means: dict[str, Floats] = {
        name: np.add.reduceat(parts[name], starts) / counts for name in CAUSES
    }
    return {
        "bucket": bucket,
        "step": step[starts].tolist(),
        **{name: values.tolist() for name, values in means.items()},
    }
