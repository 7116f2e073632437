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

    target: Target | None = Field(description="target of the run; null: none is set")
    evaluation: EvaluationInfo | None = Field(description="newest evaluation; null: none")


class WhatIf(BaseModel):
    """Forecasts for each preset, best first. If no forecast is possible, `reason` explains why."""

    run: str = Field(examples=["3f9a1c07be52"])
    made_at: float = Field(description="Unix time", examples=[1767225700.0])
    step: int | None = Field(description="last step that the forecast uses", examples=[263])
    first_step: int | None = Field(examples=[200])
    steps: int = Field(description="number of complete steps that the forecast uses", examples=[64])
    current: PolicyInForce
    fit_error: float | None = Field(
        description="error of the models on the batches that ran; widens all intervals",
        examples=[0.01],
    )
    reason: str | None = Field(examples=[None])
    forecasts: list[PresetForecast]
    recommended: str | None = Field(
        description="label of the recommended forecast, if one clearly saves time: never one that "
        "changes the training; one that keeps the batches as they are, unless another is clearly "
        "faster",
        examples=["paceline"],
    )
    left_out: list[LeftOut]
    speeds: list[float] = Field(
        description="seconds per size unit of each rank, for an equal share", examples=[[3.6e-05]]
    )
    replicates: int = Field(description="simulations of each preset", examples=[8])
    slow_node: NodeForecast | None = Field(
        description="forecast of the policy in force if the slow node were as fast as the others"
    )
    assumes: str = Field(
        description="assumptions of the forecasts about an observed run; empty: none", examples=[""]
    )
    quality: QualityNow = Field(
        description="metrics that the run's model has reached; forecasts do not predict metrics"
    )


class AutoMode(ChangeRequest):
    """Request to set what `auto` may do with a run."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool | None = Field(
        default=None,
        description="presets that change the training may also be chosen; null: unchanged",
    )


@dataclass(frozen=True)
class AutoDecision(Decision):
    """Decision of `auto` on a forecast; savings are ratios."""

    at: float = Field(description="Unix time", examples=[1767225700.0])


class Auto(BaseModel):
    """Rights of `auto` on a run, and its last decision."""

    mode: Literal["off", "recommend", "switch"] = Field(examples=["switch"])
    relaxed: bool = Field(description="presets that change the training may also be chosen")
    requested_at: float | None = Field(examples=[1767225650.0])
    requested_by: str | None = Field(examples=["api"])
    last: AutoDecision | None
    revision: int = Field(
        description="revision of the run, for the `If-Match` header of a change", examples=[0]
    )
