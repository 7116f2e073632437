"""What a forecast says. Values; as JSON in the table `forecasts` and over REST."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

log = logging.getLogger(__name__)

STEPS = 64  # newest complete steps that a forecast rests on,
FEWEST = 16  # and how many it takes at least

Decided = Literal["stay", "wait", "recommend", "switch", "back"]


class PresetForecast(msgspec.Struct, frozen=True):
    """One preset: means over full global batches, with 95 % intervals."""

    policy: str
    parameters: dict[str, Any]
    step_time_s: float
    low_s: float
    high_s: float
    saving: float  # 1 − its time / that of the policy in force, on alike batches
    saving_low: float
    saving_high: float
    words: str
    relaxed: bool = False  # its synchroniser is: training is not the same under it


class LeftOut(msgspec.Struct, frozen=True):
    """A preset of which nothing can be said, and why."""

    policy: str
    reason: str


class Current(msgspec.Struct, frozen=True):
    """The policy in force."""

    policy: str
    parameters: dict[str, Any]
    version: int
    step_time_s: float | None = None  # on batches alike those of the presets' forecasts
    measured_s: float | None = None  # its last steady steps, at a full batch's load; None: too few
    measured_steps: int = 0


class Decision(msgspec.Struct, frozen=True):
    """What `auto` makes of a run's forecasts."""

    decided: Decided
    reason: str
    policy: str | None = None  # the best other preset, or the one to go back to
    parameters: dict[str, Any] = {}
    saving: float | None = None  # forecast, of `policy`
    low: float | None = None
    high: float | None = None


class Forecast(msgspec.Struct, frozen=True):
    """All presets, or `reason` why there is nothing to say."""

    run: str
    made_at: float
    current: Current
    step: int | None = None  # the steps that it rests on: last,
    first_step: int | None = None  # first,
    steps: int = 0  # and how many
    fit_error: float | None = None  # |time on the same batches by the models / measured − 1|
    reason: str | None = None
    forecasts: list[PresetForecast] = []  # best first
    left_out: list[LeftOut] = []
    speeds: list[float] = []  # of each rank: s per size unit, of its typical batch
    replicates: int = 0  # simulations of each preset
    decision: Decision | None = None

    def of(self, policy: str) -> PresetForecast | None:
        """A preset's forecast."""
        return next((forecast for forecast in self.forecasts if forecast.policy == policy), None)


def kept(bodies: Iterable[Mapping[str, Any]]) -> list[Forecast]:
    """Forecasts from the database; another release's that this one cannot read are left out."""
    forecasts = []
    for body in bodies:
        try:
            forecasts.append(msgspec.convert(body, Forecast))
        except msgspec.ValidationError as error:
            log.info("a forecast of another release is left out: %s", error)
    return forecasts


def words(policy: str, saving: float, low: float, high: float, *, relaxed: bool = False) -> str:
    """A saving as a sentence, in percent of the time."""
    half = max(1, round(50 * (high - low)))
    price = ", but change the training" if relaxed else ""
    if low <= 0 <= high:
        return f"{policy} would make no clear difference ({100 * saving:+.0f} % ± {half}){price}"
    if saving > 0:
        return f"{policy} would save {100 * saving:.0f} % ± {half} of the time{price}"
    return f"{policy} would take {-100 * saving:.0f} % ± {half} more time{price}"
