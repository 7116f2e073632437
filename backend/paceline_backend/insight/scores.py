"""Accuracy of forecasts, compared with the measured effects of switches, over all runs.

An outcome is a switch with a forecast and a final measured effect. Errors compare times for the
same load and not savings, because a relative error of a saving near zero is meaningless.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline_backend.insight.effects import ExpectedEffect
from paceline_backend.store import Connection
from paceline_backend.store.outcomes import effects
from paceline_backend.store.outcomes.effects import OutcomeFilter

# A score is computed from at most this many outcomes, the newest ones.
MOST_OUTCOMES = 10_000
_OF_ROW = ("run", "version", "policy", "at", "nodes", "ranks")
_OF_EFFECT = ("saving", "low", "high")


@dataclass(frozen=True)
class Score:
    """Accuracy of forecasts; all fields except `count` are null if there is no outcome."""

    count: int = Field(
        description="number of switches with a forecast and a final measured effect", examples=[12]
    )
    inside: float | None = Field(
        description="share of measured savings inside the forecasts' 95 % intervals", examples=[0.9]
    )
    median_error: float | None = Field(
        description="median of |forecast time ÷ measured time − 1|", examples=[0.004]
    )
    p90_error: float | None = Field(
        description="90th percentile of |forecast time ÷ measured time − 1|", examples=[0.019]
    )
    bias: float | None = Field(
        description="mean of forecast time ÷ measured time − 1; > 0: forecast times are too long",
        examples=[-0.001],
    )


@dataclass(frozen=True)
class PresetScore(Score):
    """Accuracy of forecasts for one preset."""

    policy: str = Field(examples=["chronica"])


@dataclass(frozen=True)
class SwitchOutcome:
    """Forecast and measured effect of a switch."""

    run: str = Field(
        description="id of the run, which may have been deleted", examples=["3f9a1c07be52"]
    )
    version: int = Field(
        description="version of the policy that the switch requested", examples=[1]
    )
    policy: str = Field(examples=["chronica"])
    at: float = Field(description="Unix time of the switch", examples=[1767225700.8])
    nodes: int | None = Field(description="number of nodes of the run; null: unknown", examples=[2])
    ranks: int | None = Field(description="number of ranks of the run; null: unknown", examples=[8])
    forecast: ExpectedEffect = Field(description="forecast of the switch's effect")
    saving: float = Field(
        description="measured saving: 1 − (time per unit of load after ÷ before the switch)",
        examples=[0.56],
    )
    low: float = Field(
        description="lower bound of the 95 % confidence interval of `saving`", examples=[0.53]
    )
    high: float = Field(
        description="upper bound of the 95 % confidence interval of `saving`", examples=[0.58]
    )
    error: float = Field(
        description="forecast time ÷ measured time − 1, for the same load", examples=[0.023]
    )
    inside: bool = Field(
        description="true if `saving` is inside the 95 % interval of the forecast saving"
    )


def outcomes(
    connection: Connection, which: OutcomeFilter, limit: int, cursor: str | None = None
) -> tuple[list[SwitchOutcome], str | None]:
    """Return a page of outcomes and its next cursor; see `store.outcomes.effects.outcomes`."""
    rows, following = effects.outcomes(connection, which, limit, cursor)
    return [outcome_of(row) for row in rows], following


def outcome_of(row: Mapping[str, Any]) -> SwitchOutcome:
    """Return the outcome of a switch from its row in the table `effects`."""
    effect = row["body"]
    forecast = ExpectedEffect(**effect["forecast"])
    return SwitchOutcome(
        **{name: row[name] for name in _OF_ROW},
        **{name: effect[name] for name in _OF_EFFECT},
        forecast=forecast,
        error=(1 - forecast.saving) / (1 - effect["saving"]) - 1,
        inside=forecast.low <= effect["saving"] <= forecast.high,
    )


def score(of: Sequence[SwitchOutcome]) -> Score:
    """Return the accuracy of the forecasts of all outcomes in `of`."""
    if not of:
        return Score(0, None, None, None, None)
    errors = np.array([outcome.error for outcome in of])
    inside = float(np.mean([outcome.inside for outcome in of]))
    middle, high = np.quantile(np.abs(errors), [0.5, 0.9])
    return Score(len(of), inside, float(middle), float(high), float(errors.mean()))


def by_policy(of: Sequence[SwitchOutcome]) -> list[PresetScore]:
    """Return the score of each preset, the preset with the most outcomes first."""
    parts: dict[str, list[SwitchOutcome]] = {}
    for outcome in of:
        parts.setdefault(outcome.policy, []).append(outcome)
    order = sorted(parts, key=lambda policy: (-len(parts[policy]), policy))
    return [PresetScore(**asdict(score(parts[policy])), policy=policy) for policy in order]
