"""REST: the verdict on a run, i.e. which ranks slow it down, why, since when, and the time lost."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, ConfigDict, Field

from paceline_backend.api.errors import RUN_REFUSALS
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.runs import reused_of, settings_of, store_of
from paceline_backend.api.telemetry import Steps
from paceline_backend.insight import verdict as verdicts
from paceline_backend.insight.costs import SIMULATED
from paceline_backend.store import attempts, runs
from paceline_backend.store.reads import Range

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])


class Cause(BaseModel):
    """A cause of lost time."""

    kind: str = Field(
        description="node, transient, periodic, input, data, network, between or planning",
        examples=["node"],
    )
    ranks: list[int] = Field(
        description="ranks with this cause; empty: it names none", examples=[[3]]
    )
    who: str = Field(description="the ranks in words; empty: none", examples=["Rank 3"])
    nodes: list[str] = Field(
        description="nodes of these ranks; empty: unknown", examples=[["vm-3"]]
    )
    since: int | None = Field(
        description="first step of the cause; null: it began before the range", examples=[1204]
    )
    until: int | None = Field(description="last step of the cause; null: still active")
    factor: float | None = Field(
        description="time of these ranks with the cause ÷ without it, in the affected steps",
        examples=[2.7],
    )
    trend: tuple[float, float] | None = Field(
        description="factor when it began to grow, and now; null: the factor does not grow"
    )
    period: int | None = Field(
        description="steps from one occurrence to the next; null: not periodic"
    )
    times: int = Field(
        description="number of occurrences; 1 if the cause is continuous", examples=[1]
    )
    hidden: bool = Field(description="the plan compensates for the cause by smaller batches")
    cost_s: float = Field(
        description="wall time of the range minus what it would be without this cause",
        examples=[41.0],
    )
    share: float = Field(description="`cost_s` ÷ the wall time", examples=[0.26])
    worker_hours: float = Field(description="`cost_s` of all ranks", examples=[0.09])
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    what: str = Field(
        description="the same as a clause, without the cost",
        examples=["rank 3 on vm-3 computes 2.7 × slower since step 1,204"],
    )
    to_do: str = Field(
        description="recommended action, as a clause", examples=["look at its machine"]
    )


class RunVerdict(BaseModel):
    """Reasons why a run takes longer than it could."""

    model_config = ConfigDict(populate_by_name=True)

    from_: int | None = Field(alias="from", description="first step", examples=[1000])
    to: int | None = Field(description="last step", examples=[1499])
    steps: int = Field(
        description="number of steps in which at least two ranks had samples", examples=[500]
    )
    wall_s: float = Field(description="wall time of these steps", examples=[158.0])
    waste: float = Field(
        description="mean share of `wall_s` that ranks spend waiting", examples=[0.24]
    )
    noise: float = Field(
        description="relative standard deviation of the time of a normal step", examples=[0.02]
    )
    cost_s: float = Field(description="time lost to all causes together", examples=[41.0])
    causes: list[Cause] = Field(
        description="significant causes: the active ones by cost, then the past ones"
    )
    words: str = Field(examples=["Rank 3 computes 2.7 × slower since step 1,204."])
    level: str = Field(
        description="level of the newest steps: healthy, watch, held-up, or unknown (too few "
        "steps)",
        examples=["held-up"],
    )
    what: str = Field(
        description="the first cause as a clause; empty: unknown",
        examples=["rank 3 on vm-3 computes 2.7 × slower since step 1,204"],
    )
    was: str = Field(
        description="the same in the past tense, for a run that has ended",
        examples=["rank 3 on vm-3 computed 2.7 × slower since step 1,204"],
    )
    lost_now: float = Field(
        description="share of the wall time that is lost to active causes, in the newest steps",
        examples=[0.26],
    )
    waste_now: float = Field(description="`waste` of the newest steps", examples=[0.24])
    step_time_s: float | None = Field(
        description="mean wall time of the newest 50 steps; null: too few", examples=[0.609]
    )
    limit_s: float | None = Field(
        description="fluid limit of these steps, with the measured time per load of each rank; "
        "null: unknown",
        examples=[0.446],
    )


class Price(BaseModel):
    """Price of one worker-hour."""

    amount: float = Field(examples=[2.5])
    currency: str = Field(examples=["EUR"])


class PricedVerdict(RunVerdict):
    """A run's verdict, with the price of a worker-hour."""

    price: Price | None = Field(
        description="price of a worker-hour, from `paceline server --hour-price`; null: no price "
        "is set, or the run is simulated"
    )


@router.get("/verdict", response_model=PricedVerdict)
def get_verdict(request: Request, run: str, steps: Steps) -> Any:
    """Return the causes of lost time and their costs, by default in the newest 500 steps."""
    with store_of(request).read() as connection:
        key = runs.key_of(connection, run)
        simulated = runs.terms(connection, [run])[run].backend == SIMULATED
    _, verdict, _ = judged(request, key, steps.span)
    price = settings_of(request).hour_price
    shown = None if price is None or simulated else vars(price)
    return {**verdicts.facts_of(verdict), "price": shown}


def judged(
    request: Request, run: int, span: Range
) -> tuple[verdicts.ObservedSteps, verdicts.Verdict, attempts.Placement | None]:
    """Return a range of steps, the verdict on it, and the placement of ranks at its end.

    The result may be some seconds old. Without `span`, it covers as many of the newest steps as a
    verdict can.
    """

    def judge() -> tuple[verdicts.ObservedSteps, verdicts.Verdict, attempts.Placement | None]:
        with store_of(request).read() as connection:
            placement = attempts.placement(connection, run, span[1])
            seen = verdicts.read_observed(connection, run, span, placement)
        # The judgement takes a while, so no database connection is held during the call.
        return seen, verdicts.judge(seen), placement

    return reused_of(request).get(("verdict", run, span), judge)
