"""Bodies about history. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from paceline_backend.api.evidence.verdict import RunVerdict
from paceline_backend.api.evidence.whatif_models import AutoDecision
from paceline_backend.api.models import ChangeRequest, Text
from paceline_backend.api.quality_models import Direction, Source
from paceline_backend.api.step_models import DeviceInfo
from paceline_backend.insight.whatif.answer import (
    LeftOut,
    NodeForecast,
    PolicyInForce,
    PresetForecast,
)

Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:-]{0,62}$")]


class Note(ChangeRequest):
    """Request to set the note of a run."""

    note: Annotated[Text, StringConstraints(max_length=10_000)] = Field(
        description="replaces the previous note; empty: no note", examples=["with the new data"]
    )


class TagCount(BaseModel):
    """A tag, and the number of runs that have it."""

    tag: str = Field(examples=["nightly"])
    runs: int = Field(description="number of runs with this tag", examples=[12])


class Aggregate(BaseModel):
    """Sums and means over a group of runs. Only fields of the requested grouping are present."""

    day: str | None = Field(default=None, description="UTC", examples=["2026-01-01"])
    run: str | None = Field(default=None, examples=["3f9a1c07be52"])
    node: str | None = Field(default=None, examples=["node-1"])
    policy: str | None = Field(
        default=None, description="policy that planned the steps", examples=["paceline"]
    )
    tag: str | None = Field(default=None, examples=["nightly"])
    device: str | None = Field(default=None, examples=["cpu"])
    backend: str | None = Field(default=None, examples=["local"])
    simulated: bool = Field(description="simulated runs, which are counted in separate rows")
    runs: int = Field(examples=[3])
    steps: int = Field(description="complete steps", examples=[12_000])
    wall_s: float = Field(description="sum of the step times", examples=[3_600.0])
    step_s: float | None = Field(description="mean", examples=[0.3])
    se: float | None = Field(description="mean", examples=[0.1])
    waste: float | None = Field(description="mean", examples=[0.06])
    worker_hours: float = Field(description="worker-hours of all ranks", examples=[8.0])
    waiting_hours: float = Field(
        description="of these, spent waiting for slower ranks", examples=[0.5]
    )
    cost: float | None = Field(
        description="cost of the time of all ranks; null: no price is set, or the time is "
        "simulated",
        examples=[12.4],
    )
    waited_cost: float | None = Field(
        description="part of the cost that is due to waiting", examples=[0.8]
    )
    currency: str | None = Field(
        description="currency of both costs; null: no costs", examples=["USD"]
    )


class EpochSummary(BaseModel):
    """Sums and means over the complete steps of an epoch."""

    epoch: int = Field(examples=[1])
    first_step: int = Field(examples=[300])
    last_step: int = Field(examples=[599])
    steps: int = Field(examples=[300])
    samples: int = Field(examples=[19_200])
    wall_s: float = Field(description="sum of the steps' times", examples=[90.0])
    first_ended_at: float = Field(
        description="Unix time at which its first step ended", examples=[1767225700.0]
    )
    ended_at: float = Field(
        description="Unix time at which its last step ended", examples=[1767225790.0]
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
    steps: int = Field(description="steps that the worker reported", examples=[300])
    samples: int = Field(examples=[4_800])
    load: float = Field(examples=[1_536_000.0])
    share: float = Field(description="share of the load of all workers", examples=[0.25])
    dif: float | None = Field(
        description="sample standard deviation of the sizes of its samples; null: unknown",
        examples=[96.5],
    )
    ett_s: float | None = Field(
        description="Σ ETT of the steps that have one; null: none has", examples=[58.1]
    )
    compute_s: float = Field(description="Σ T", examples=[57.0])
    ett_error: float | None = Field(
        description="|Σ ETT − Σ T| / Σ T over the steps with an ETT", examples=[0.02]
    )
    data_s: float = Field(description="seconds spent waiting for the data loader", examples=[0.3])
    wait_s: float = Field(description="seconds spent waiting for slower ranks", examples=[6.2])
    wall_s: float = Field(description="sum of its step times", examples=[90.0])
    waste: float | None = Field(description="wait_s ÷ wall_s", examples=[0.07])
    slowest_share: float = Field(
        description="share of steps in which it was the slowest", examples=[0.1]
    )
    came: int | None = Field(
        description="its samples that another worker had in the previous epoch; null: unknown",
        examples=[1_204],
    )
    came_load: float | None = Field(description="load of these samples", examples=[385_280.0])
    went: int | None = Field(
        description="its samples of the previous epoch that another worker has now",
        examples=[1_204],
    )
    went_load: float | None = Field(description="load of these samples", examples=[385_280.0])


class Assigned(BaseModel):
    """The samples that a rank got in a step."""

    step: int = Field(examples=[12])
    epoch: int = Field(examples=[0])
    attempt: int = Field(examples=[0])
    rank: int = Field(examples=[3])
    samples: list[int] = Field(description="indices in the data set", examples=[[17, 4, 91]])


class Assignments(BaseModel):
    """Samples that each rank got, by step and rank."""

    items: list[Assigned]
    next_from: int | None = Field(
        description="`from` of the next page; null: the last page", examples=[None]
    )


class PlacedRank(BaseModel):
    """A rank's node, and what is known about its device."""

    rank: int = Field(examples=[0])
    node: str | None = Field(description="null: unknown", examples=["node-1"])
    limit: int | None = Field(
        description="samples that fit into its memory; null: unknown", examples=[64]
    )
    profile: list[tuple[int, float]] = Field(
        description="samples and seconds of its trial steps; empty: no trial steps",
        examples=[[[8, 0.1], [16, 0.18]]],
    )
    device: DeviceInfo | None = Field(description="null: unknown")


class RunDevices(BaseModel):
    """Ranks and their devices, as the leader of the latest attempt reported them."""

    attempt: int | None = Field(description="null: its leader has not reported yet", examples=[0])
    device: str | None = Field(examples=["NVIDIA H100"])
    emulated: dict[str, Any] | None = Field(description="emulated device speeds", examples=[None])
    paceline: str | None = Field(description="Paceline version of the ranks", examples=["0.1.0"])
    torch: str | None = Field(examples=["2.8.0"])
    ranks: list[PlacedRank]


class PastForecast(BaseModel):
    """A stored forecast, with the decision of `auto` on it."""

    made_at: float = Field(description="Unix time", examples=[1767225700.0])
    step: int | None = Field(description="last step that the forecast uses", examples=[263])
    first_step: int | None = Field(examples=[8])
    steps: int = Field(examples=[256])
    current: PolicyInForce
    fit_error: float | None = Field(examples=[0.01])
    forecasts: list[PresetForecast]
    left_out: list[LeftOut]
    slow_node: NodeForecast | None
    option: str | None = Field(
        description="only preset in this forecast, made to confirm an earlier forecast"
    )
    decision: AutoDecision | None = Field(description="decision of `auto`; null: it made none")


class Verdicts(BaseModel):
    """Verdicts about consecutive parts of a run."""

    items: list[RunVerdict]


class ComparedSide(BaseModel):
    """One side of a comparison: a run, or some of its steps."""

    model_config = ConfigDict(populate_by_name=True)

    side: str = Field(description="side as in the request", examples=["3f9a1c07be52@1"])
    run: str = Field(examples=["3f9a1c07be52"])
    name: str = Field(examples=["train"])
    policy: str = Field(description="policy in force in the last step", examples=["paceline"])
    version: int = Field(examples=[1])
    from_: int | None = Field(alias="from", description="first step", examples=[84])
    to: int | None = Field(description="last step", examples=[599])
    steps: int = Field(description="number of complete steps that count", examples=[516])
    trained: list[tuple[int, int]] = Field(
        description="some steps, each with the number of samples that the run had trained on "
        "before it",
        examples=[[(84, 2_688), (599, 19_168)]],
    )


class Difference(BaseModel):
    """Difference of one side from the first side.

    `low` and `high` bound the 95 % confidence interval; null: unknown.
    """

    value: float = Field(description="this side's value minus the first side's", examples=[-0.15])
    low: float | None = Field(examples=[-0.16])
    high: float | None = Field(examples=[-0.14])
    ratio: float | None = Field(
        description="this side's value ÷ the first side's − 1", examples=[-0.25]
    )
    known: bool = Field(description="the interval is known and excludes zero")
    better: bool | None = Field(
        description="whether a known change is an improvement; null: neither better nor worse"
    )


class ComparedTarget(BaseModel):
    """A target of one of the sides."""

    metric: str = Field(examples=["accuracy"])
    value: float = Field(examples=[0.9])
    direction: Direction = Field(examples=[">="])
    source: Source = Field(description="source of the values, as in a run's target")


class ComparedFigure(BaseModel):
    """A metric of all sides."""

    figure: str = Field(
        description="`last`, `best`, `least`, `greatest` of a metric; `after_s`, `epoch`, "
        "`trained` of a target; `cost`, `waited_cost`; otherwise a metric of steps",
        examples=["step_s"],
    )
    unit: str = Field(description="unit; for costs, the currency", examples=["s"])
    metric: str | None = Field(
        default=None,
        description="metric of evaluations to which the figure belongs",
        examples=[None],
    )
    target: ComparedTarget | None = Field(
        default=None, description="target to which the figure belongs", examples=[None]
    )
    values: list[float | None] = Field(description="value of each side", examples=[[0.6, 0.45]])
    changes: list[Difference | None] = Field(
        description="difference of each further side; null: unknown"
    )


class Comparison(BaseModel):
    """Comparison of runs, or of parts of runs."""

    sides: list[ComparedSide]
    differences: list[ComparedFigure]
    words: list[str] = Field(
        description="a sentence about each further side",
        examples=[["B takes 25.4 % ± 0.8 less time per step."]],
    )
