"""Forecasts against outcomes: how right forecasts were, over all runs.

A switch with a forecast and a final effect is an outcome. Errors are those of the forecast time for
the same load, relative to the measured one: of savings near zero, a relative error says nothing.
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

MOST = 10_000  # outcomes that a score rests on, the newest ones
_STORED = ("run", "version", "policy", "at", "nodes", "ranks", "saving", "low", "high")


@dataclass(frozen=True)
class Score:
    """How right forecasts were. Errors are of the time for the same load, relative to it."""

    count: int = Field(description="outcomes", examples=[12])
    inside: float | None = Field(
        description="share of measured savings inside the forecasts' 95 % intervals", examples=[0.9]
    )
    median_error: float | None = Field(description="absolute", examples=[0.004])
    p90_error: float | None = Field(description="absolute", examples=[0.019])
    bias: float | None = Field(
        description="mean error; > 0: forecasts are too long", examples=[-0.001]
    )


@dataclass(frozen=True)
class PresetScore(Score):
    """The same, of one preset."""

    policy: str = Field(examples=["chronica"])


@dataclass(frozen=True)
class SwitchOutcome:
    """A switch: what was forecast, and what was measured."""

    run: str = Field(description="which may be gone", examples=["3f9a1c07be52"])
    version: int = Field(description="of the policy", examples=[1])
    policy: str = Field(examples=["chronica"])
    at: float = Field(description="Unix time of the switch", examples=[1767225700.8])
    nodes: int | None = Field(description="null: unknown", examples=[2])
    ranks: int | None = Field(description="null: unknown", examples=[8])
    forecast: ExpectedEffect = Field()
    saving: float = Field(description="measured", examples=[0.56])
    low: float = Field(description="`low` and `high` bound 95 %", examples=[0.53])
    high: float = Field(examples=[0.58])
    error: float = Field(description="forecast time ÷ measured time − 1", examples=[0.023])
    inside: bool = Field(description="`saving` is inside the forecast's interval")


def outcomes(
    connection: Connection, which: OutcomeFilter, limit: int, cursor: str | None = None
) -> tuple[list[SwitchOutcome], str | None]:
    """`store.outcomes.effects.outcomes`, as values."""
    rows, following = effects.outcomes(connection, which, limit, cursor)
    return [outcome_of(row) for row in rows], following


def outcome_of(row: Mapping[str, Any]) -> SwitchOutcome:
    """Return the outcome of a switch from its row in the table `effects`."""
    forecast = ExpectedEffect(*(row[f"forecast_{name}"] for name in ("saving", "low", "high")))
    return SwitchOutcome(
        **{name: row[name] for name in _STORED},
        forecast=forecast,
        error=(1 - forecast.saving) / (1 - row["saving"]) - 1,
        inside=forecast.low <= row["saving"] <= forecast.high,
    )


def score(of: Sequence[SwitchOutcome]) -> Score:
    """Scores outcomes together."""
    if not of:
        return Score(0, None, None, None, None)
    errors = np.array([outcome.error for outcome in of])
    inside = float(np.mean([outcome.inside for outcome in of]))
    middle, high = np.quantile(np.abs(errors), [0.5, 0.9])
    return Score(len(of), inside, float(middle), float(high), float(errors.mean()))


def by_policy(of: Sequence[SwitchOutcome]) -> list[PresetScore]:
    """The score of each preset; those with most outcomes first."""
    parts: dict[str, list[SwitchOutcome]] = {}
    for outcome in of:
        parts.setdefault(outcome.policy, []).append(outcome)
    order = sorted(parts, key=lambda policy: (-len(parts[policy]), policy))
    return [PresetScore(**asdict(score(parts[policy])), policy=policy) for policy in order]
