"""Bodies about forecasts and `auto`. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from paceline_backend.api.models import ChangeRequest
from paceline_backend.api.quality_models import EvaluationInfo, Target
from paceline_backend.insight.whatif.answer import (
    Decision,
    LeftOut,
    NodeForecast,
    PolicyInForce,
    PresetForecast,
)


class QualityNow(BaseModel):
    """Target of a run, and its newest evaluation."""

    target: Target | None = Field(description="as of the run; null: nobody has set one")
    evaluation: EvaluationInfo | None = Field(description="the newest; null: there is none")


class WhatIf(BaseModel):
    """Forecasts for each preset, best first. If no forecast is possible, `reason` explains why."""

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
    slow_node: NodeForecast | None = Field(
        description="the policy in force, if a node that is slow were as fast as the others"
    )
    assumes: str = Field(
        description="what the forecasts assume of an observed run; empty: nothing", examples=[""]
    )
    quality: QualityNow = Field(
        description="what the run's model has reached; no forecast says what it would reach"
    )


class AutoMode(ChangeRequest):
    """Request to set what `auto` may do with a run."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool | None = Field(
        default=None,
        description="presets that change the training may be chosen, too; null: as it was",
    )


@dataclass(frozen=True)
class AutoDecision(Decision):
    """Decision of `auto` on a forecast; savings are ratios."""

    at: float = Field(description="Unix time", examples=[1767225700.0])


class Auto(BaseModel):
    """Rights of `auto` on a run, and its last decision."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool = Field(description="presets that change the training may be chosen, too")
    requested_at: float | None = Field(examples=[1767225650.0])
    requested_by: str | None = Field(examples=["api"])
    last: AutoDecision | None
    revision: int = Field(description="the run's, for the `If-Match` of a change", examples=[0])
