"""REST: who holds a run up, why, since when, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import store_of
from paceline_backend.api.telemetry import From, To
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.verdict import Finding, Verdict
from paceline_backend.store import attempts, runs

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])


class Cause(BaseModel):
    """One cause of lost time."""

    kind: str = Field(
        description="node, transient, periodic, input, data, network, between or planning",
        examples=["node"],
    )
    ranks: list[int] = Field(description="empty: no rank is named", examples=[[3]])
    who: str = Field(description="the ranks in words; empty: none", examples=["Rank 3"])
    nodes: list[str] = Field(description="on which they are; empty: unknown", examples=[["vm-3"]])
    since: int | None = Field(
        description="its first step; null: it was there when the range began", examples=[1204]
    )
    until: int | None = Field(description="its last step; null: it goes on")
    factor: float | None = Field(
        description="time of these ranks with it ÷ without it, in its steps", examples=[2.7]
    )
    trend: tuple[float, float] | None = Field(
        description="the factor when it began to grow, and now; null: it does not grow"
    )
    period: int | None = Field(description="steps from one time to the next; null: none")
    times: int = Field(description="how often; 1 if it lasts", examples=[1])
    hidden: bool = Field(description="the plan makes up for it: nobody waits")
    cost_s: float = Field(
        description="wall time of the range minus what it would be without this cause",
        examples=[41.0],
    )
    share: float = Field(description="`cost_s` ÷ the wall time", examples=[0.26])
    worker_hours: float = Field(description="`cost_s` of all ranks", examples=[0.09])
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    to_do: str = Field(description="what helps: a clause", examples=["look at its machine"])


class RunVerdict(BaseModel):
    """Why a run takes longer than it could."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(alias="from", description="first step", examples=[1000])
    to: int | None = Field(description="last step", examples=[1499])
    steps: int = Field(description="in which at least two ranks had samples", examples=[500])
    wall_s: float = Field(description="their wall time", examples=[158.0])
    waste: float = Field(description="share of the ranks' time spent waiting", examples=[0.4])
    noise: float = Field(description="relative standard deviation of a usual step", examples=[0.02])
    cost_s: float = Field(description="what all causes cost together", examples=[41.0])
    causes: list[Cause] = Field(
        description="those that count: what goes on, by cost, then what has passed"
    )
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])


@router.get("/verdict", response_model=RunVerdict)
def get_verdict(request: Request, run: str, first: From = None, to: To = None) -> Any:
    """Who holds the run up, why, since when, and what it costs; by default in 500 steps."""
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
        placement = attempts.placement(connection, key, to)
        seen = verdicts.read_observed(connection, key, (first, to), placement)
    return answer(verdicts.judge(seen))


def answer(verdict: Verdict) -> dict[str, Any]:
    """The body of a verdict."""
    step = verdict.seen.step
    return {
        "from": int(step[0]) if len(step) else None,
        "to": int(step[-1]) if len(step) else None,
        "steps": verdict.steps,
        "wall_s": verdict.wall_s,
        "waste": verdict.waste,
        "noise": verdict.noise,
        "cost_s": verdict.cost_s,
        "causes": [_cause(verdict, cause) for cause in verdict.causes],
        "words": verdicts.words(verdict),
    }


def _cause(verdict: Verdict, cause: Finding) -> dict[str, Any]:
    step, nodes = verdict.seen.step, verdict.seen.nodes
    world = verdict.seen.compute_s.shape[1]

    def at(index: int | None) -> int | None:
        return None if index is None else int(step[index])

    return {
        "kind": cause.kind,
        "ranks": list(cause.ranks),
        "who": verdicts.named(cause.ranks, world, nodes) if cause.ranks else "",
        "nodes": _nodes(cause.ranks, nodes),
        "since": at(cause.since),
        "until": at(cause.until),
        "factor": cause.factor,
        "trend": cause.trend,
        "period": cause.period,
        "times": cause.times,
        "hidden": cause.hidden,
        "cost_s": cause.cost_s,
        "share": cause.cost_s / verdict.wall_s,
        "worker_hours": cause.cost_s * world / 3600,
        "words": verdicts.cause_words(verdict, cause),
        "to_do": verdicts.to_do(cause),
    }


def _nodes(ranks: Sequence[int], nodes: Sequence[str]) -> list[str]:
    return sorted({nodes[rank] for rank in ranks if rank < len(nodes)})
