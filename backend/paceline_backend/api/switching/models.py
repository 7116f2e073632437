"""Bodies about switches of a run's policy. `docs/rest.md` describes the fields."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field
from pydantic.dataclasses import dataclass

from paceline_backend.api.models import ChangeRequest, PolicyName, SwitchInfo
from paceline_backend.insight.effects import SwitchEffect
from paceline_backend.insight.quality import MetricChange


class PolicySwitch(ChangeRequest):
    """Request to switch the policy of a run."""

    policy: PolicyName = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(default={}, examples=[{}])


class RunPolicy(BaseModel):
    """Policy of a run: the one that plans now, and the one that follows."""

    in_force: SwitchInfo = Field(description="policy that planned the newest segment")
    requested: SwitchInfo | None = Field(
        description="policy from the next segment on; null: no switch is pending"
    )
    revision: int = Field(
        description="revision of the run, for the `If-Match` header of a change", examples=[3]
    )


class RequestedSwitch(SwitchInfo):
    """Response to a switch request."""

    revision: int = Field(description="revision of the run after the switch", examples=[4])
    warnings: list[str] | None = Field(
        description="warnings about the policy, those about harm first; null: not known within "
        "half a second, so request `GET /runs/{run}/policy/warnings`",
        examples=[[]],
    )


class SwitchWarnings(BaseModel):
    """Warnings before a switch."""

    warnings: list[str] = Field(description="warnings about harm first; empty: none", examples=[[]])


@dataclass(frozen=True)
class ReportedEffect(SwitchEffect):
    """Effect of a switch: change of the time for the same load.

    Steps in which a policy still learns are left out.
    """

    words: str = Field(examples=["Steps take 56 % less time for the same load (53 to 58 %)."])
    metrics: list[MetricChange] = Field(
        description="metrics before and after, if a policy changes the training; the switch need "
        "not be the cause: training continued meanwhile"
    )
    metrics_words: str = Field(description="the same in words; empty: none", examples=[""])
