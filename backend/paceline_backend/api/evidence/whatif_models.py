"""Bodies about forecasts and `auto`; field names as in docs/rest.md."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from paceline_backend.api.models import Change
from paceline_backend.api.quality_models import Evaluation, Target


class PolicyInForce(BaseModel):
    """What savings are measured against."""

    policy: str = Field(examples=["bsp"])
    parameters: dict[str, Any] = Field(examples=[{}])
    version: int = Field(examples=[0])
    step_time_s: float | None = Field(
        description="forecast, on batches alike the presets'", examples=[0.41]
    )
    measured_s: float | None = Field(
        description="of its last steady steps, at a mean batch's load; null: too few",
        examples=[0.42],
    )
    measured_steps: int = Field(examples=[64])


class PresetForecast(BaseModel):
    """What a preset would take; `low` and `high` bound 95 %."""

    policy: str = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(description="{}: its defaults", examples=[{}])
    step_time_s: float = Field(description="mean, at a mean batch's load", examples=[0.25])
    low_s: float = Field(examples=[0.24])
    high_s: float = Field(examples=[0.26])
    saving: float = Field(description="1 − step_time_s / that of the policy in force")
    saving_low: float = Field(examples=[0.36])
    saving_high: float = Field(examples=[0.41])
    words: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    relaxed: bool = Field(description="ranks do not wait for all: another training")
    changes: Literal["nothing", "batches", "training"] = Field(
        description="in the training: nothing, which samples share a batch, or when gradients meet"
    )
    label: str = Field(
        description="the preset, with its parameters", examples=["paceline (mode free)"]
    )
    in_force: bool = Field(description="this is the policy in force")
    warnings: list[str] = Field(
        description="what to know before a switch to it, those of harm first", examples=[[]]
    )
    harmful: bool = Field(description="plain DDP is faster: `auto` never chooses it")
    alone: int | None = Field(
        description="most steps or rounds after which a rank's work reaches other ranks; null: "
        "only at an epoch's end",
        examples=[0],
    )
    stale: bool = Field(description="rounds may apply gradients that were computed rounds before")


class Saving(BaseModel):
    """What the newest forecast says of a run whose slow node is as fast as the others."""

    step_time_s: float = Field(examples=[0.11])
    low_s: float = Field(description="`low` and `high` bound 95 %", examples=[0.1])
    high_s: float = Field(examples=[0.12])
    saving: float = Field(description="1 − this time ÷ the present one", examples=[0.6])
    saving_low: float = Field(examples=[0.57])
    saving_high: float = Field(examples=[0.63])
    words: str = Field(
        examples=["if n2 were as fast as the others, steps would take 60 % ± 3 less time"]
    )


class SlowNode(Saving):
    """What a step would take if a slow node's ranks were as fast as the median of the others."""

    node: str = Field(examples=["n2"])
    ranks: list[int] = Field(description="that are slow", examples=[[2, 3]])
    factor: float = Field(description="their time ÷ the others', at equal load", examples=[3.0])


class LeftOut(BaseModel):
    """A preset of which nothing can be said."""

    policy: str = Field(examples=["ep4ddl"])
    reason: str


class QualityNow(BaseModel):
    """What a run's model has reached so far."""

    target: Target | None = Field(description="as of the run; null: nobody has set one")
    evaluation: Evaluation | None = Field(description="the newest; null: there is none")


class WhatIf(BaseModel):
    """What each preset would take, best first; or `reason` why nothing can be said."""

    run: str = Field(examples=["3f9a1c07be52"])
    made_at: float = Field(description="Unix time", examples=[1767225700.0])
    step: int | None = Field(description="last one that it rests on", examples=[263])
    first_step: int | None = Field(examples=[200])
    steps: int = Field(description="complete ones that it rests on", examples=[64])
    current: PolicyInForce
    fit_error: float | None = Field(
        description="of the models, on the batches that ran; widens all intervals", examples=[0.01]
    )
    reason: str | None = Field(examples=[None])
    forecasts: list[PresetForecast]
    recommended: str | None = Field(
        description="label of the forecast to go for, if one clearly saves: never one that changes "
        "the training; one that leaves batches as they are, unless another is clearly faster",
        examples=["paceline"],
    )
    left_out: list[LeftOut]
    speeds: list[float] = Field(
        description="of each rank s per size unit, for an equal share", examples=[[3.6e-05]]
    )
    replicates: int = Field(description="simulations of each preset", examples=[8])
    slow_node: SlowNode | None = Field(
        description="the policy in force, if a node that is slow were as fast as the others"
    )
    assumes: str = Field(
        description="what the forecasts assume of an observed run; empty: nothing", examples=[""]
    )
    quality: QualityNow = Field(
        description="what the run's model has reached; no forecast says what it would reach"
    )


class AutoMode(Change):
    """What `auto` may do."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool | None = Field(
        default=None,
        description="presets that change the training may be chosen, too; null: as it was",
    )


class AutoDecision(BaseModel):
    """What `auto` made of a forecast; savings as ratios."""

    decided: Literal["stay", "wait", "recommend", "switch", "back"] = Field(examples=["switch"])
    reason: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    policy: str | None = Field(description="the one to go on with", examples=["chronica"])
    parameters: dict[str, Any] = Field(examples=[{}])
    saving: float | None = Field(examples=[0.38])
    low: float | None = Field(examples=[0.36])
    high: float | None = Field(examples=[0.41])
    at: float = Field(description="Unix time", examples=[1767225700.0])


class Auto(BaseModel):
    """What `auto` may do with a run, and what it decided last."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool = Field(description="presets that change the training may be chosen, too")
    requested_at: float | None = Field(examples=[1767225650.0])
    requested_by: str | None = Field(examples=["api"])
    last: AutoDecision | None
    revision: int = Field(description="the run's, for the `If-Match` of a change", examples=[0])
