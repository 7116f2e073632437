"""Forecasts against outcomes: how right forecasts were, over all runs.

A switch with a forecast and a final effect is an outcome. Errors are those of the forecast time for
the same load, relative to the measured one: of savings near zero, a relative error says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline_backend.insight.effects import Expected
from paceline_backend.store import Connection
from paceline_backend.store.outcomes import effects
from paceline_backend.store.outcomes.effects import Filter

MOST = 10_000  # outcomes that a score rests on, the newest ones


@dataclass(frozen=True)
class Outcome:
    """What a switch was forecast to change, and what it changed.

    Args:
        run: public id; the run may be gone.
        version: of the policy.
        policy: that was switched to.
        at: Unix time of the switch.
        nodes: that ranks were on; None: unknown.
        ranks: how many; None: unknown.
        forecast: saving, and its 95 % interval.
        saving: as measured.
        low: of its 95 % interval,
        high: and its upper end.
    """

    run: str
    version: int
    policy: str
    at: float
    nodes: int | None
    ranks: int | None
    forecast: Expected
    saving: float
    low: float
    high: float

    @property
    def inside(self) -> bool:
        """Whether the measured saving is inside the forecast's interval."""
        return self.forecast.low <= self.saving <= self.forecast.high

    @property
    def error(self) -> float:
        """The forecast time ÷ the measured one, − 1; > 0: the forecast was too long."""
        return (1 - self.forecast.saving) / (1 - self.saving) - 1


@dataclass(frozen=True)
class Score:
    """How right some forecasts were; None: there are none.

    Args:
        count: outcomes.
        inside: share of measured savings inside the forecasts' 95 % intervals.
        median_error: of the absolute relative errors,
        p90_error: and their 90th percentile.
        bias: mean of the relative errors; > 0: forecasts are too long.
    """

    count: int
    inside: float | None = None
    median_error: float | None = None
    p90_error: float | None = None
    bias: float | None = None


def outcomes(
    connection: Connection, which: Filter, limit: int, cursor: str | None = None
) -> tuple[list[Outcome], str | None]:
    """`store.outcomes.effects.outcomes`, as values."""
    rows, following = effects.outcomes(connection, which, limit, cursor)
    names = Expected.__annotations__
    made = []
    for row in rows:
        forecast = Expected(**{name: row[f"forecast_{name}"] for name in names})
        plain = {name: row[name] for name in Outcome.__annotations__ if name != "forecast"}
        made.append(Outcome(**plain, forecast=forecast))
    return made, following


def score(of: Sequence[Outcome]) -> Score:
    """Scores outcomes together."""
    if not of:
        return Score(0)
    errors = np.array([outcome.error for outcome in of])
    inside = float(np.mean([outcome.inside for outcome in of]))
    middle, high = np.quantile(np.abs(errors), [0.5, 0.9])
    return Score(len(of), inside, float(middle), float(high), float(errors.mean()))


def by_policy(of: Sequence[Outcome]) -> dict[str, Score]:
    """The score of each preset, by its name; those with most outcomes first."""
    parts: dict[str, list[Outcome]] = {}
    for outcome in of:
        parts.setdefault(outcome.policy, []).append(outcome)
    order = sorted(parts, key=lambda policy: (-len(parts[policy]), policy))
    return {policy: score(parts[policy]) for policy in order}
