"""Values of a forecast, which are stored as JSON in the table `forecasts` and sent over REST.

`best_of` chooses the option that a forecast recommends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from paceline_backend.policies import Changes

# Number of the newest complete steps that a forecast uses.
FORECAST_STEPS = 256
# Minimum number of steps for a forecast.
FEWEST_FORECAST_STEPS = 16
# A switch is worthwhile only if the lower bound of the saving's 95 % interval exceeds this.
MARGIN = 0.05

_PRICES: Mapping[Changes, str] = {
    "nothing": "",
    "batches": ", with other samples in a batch",
    "training": ", but change the training: the time to the same loss is not forecast",
}

Decided = Literal["stay", "wait", "recommend", "switch", "back"]


@dataclass(frozen=True)
class PresetForecast:
    """Forecast of the step time under a preset; `low` and `high` bound 95 %."""

    policy: str = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(description="{}: the defaults", examples=[{}])
    step_time_s: float = Field(description="mean, at the load of a mean batch", examples=[0.25])
    low_s: float = Field(examples=[0.24])
    high_s: float = Field(examples=[0.26])
    saving: float = Field(description="1 − step_time_s ÷ step time of the policy in force")
    saving_low: float = Field(examples=[0.36])
    saving_high: float = Field(examples=[0.41])
    words: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    relaxed: bool = Field(
        description="ranks do not wait for all others, which changes the training"
    )
    changes: Changes = Field(
        description="effect on the training: nothing, which samples share a batch, or when "
        "gradients are reduced"
    )
    label: str = Field(
        description="the preset, with its parameters", examples=["paceline (mode free)"]
    )
    in_force: bool = Field(description="this is the policy in force")
    warnings: list[str] = Field(
        description="warnings about a switch to the preset, those about harm first", examples=[[]]
    )
    harmful: bool = Field(description="plain DDP is faster: `auto` never chooses it")
    alone: int | None = Field(
        description="maximum number of steps or rounds after which a rank's work reaches other "
        "ranks; null: only at the end of an epoch",
        examples=[0],
    )
    stale: bool = Field(
        description="rounds may apply gradients that were computed in earlier rounds"
    )


@dataclass(frozen=True)
class Saving:
    """Newest forecast for a run whose slow node is as fast as its other nodes."""

    step_time_s: float = Field(examples=[0.11])
    low_s: float = Field(
        description="`low` and `high` bound the 95 % confidence interval", examples=[0.1]
    )
    high_s: float = Field(examples=[0.12])
    saving: float = Field(description="1 − this time ÷ current time", examples=[0.6])
    saving_low: float = Field(examples=[0.57])
    saving_high: float = Field(examples=[0.63])
    words: str = Field(
        examples=["if n2 were as fast as the others, steps would take 60 % ± 3 less time"]
    )


@dataclass(frozen=True)
class NodeForecast(Saving):
    """Forecast of the step time if a slow node's ranks were as fast as the median of the others."""

    node: str = Field(examples=["n2"])
    ranks: list[int] = Field(description="slow ranks", examples=[[2, 3]])
    factor: float = Field(
        description="time of the slow ranks ÷ time of the others, at equal load", examples=[3.0]
    )


@dataclass(frozen=True)
class LeftOut:
    """Preset that could not be forecast."""

    policy: str = Field(examples=["ep4ddl"])
    reason: str = Field()


@dataclass(frozen=True)
class PolicyInForce:
    """Policy in force, the reference for all savings."""

    policy: str = Field(examples=["bsp"])
    parameters: dict[str, Any] = Field(examples=[{}])
    version: int = Field(examples=[0])
    step_time_s: float | None = Field(
        description="forecast, on the same kind of batches as for presets", examples=[0.41]
    )
    measured_s: float | None = Field(
        description="measured in its last steady steps, at the load of a mean batch; null: too few",
        examples=[0.42],
    )
    measured_steps: int = Field(examples=[64])


@dataclass(frozen=True)
class Decision:
    """Decision of `auto` about a forecast; savings are ratios."""

    decided: Decided = Field(examples=["switch"])
    reason: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    policy: str | None = Field(description="policy to continue with", examples=["chronica"])
    parameters: dict[str, Any] = Field(examples=[{}])
    saving: float | None = Field(examples=[0.38])
    low: float | None = Field(examples=[0.36])
    high: float | None = Field(examples=[0.41])


@dataclass(frozen=True)
class Forecast:
    """Forecasts for all presets, or the `reason` why there are none."""

    run: str
    made_at: float
    current: PolicyInForce
    # Last and first of the steps that the forecast uses, and their number.
    step: int | None = None
    first_step: int | None = None
    steps: int = 0
    # |Modelled time ÷ measured time − 1|, on the same batches.
    fit_error: float | None = None
    reason: str | None = None
    # The best preset comes first.
    forecasts: list[PresetForecast] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    # Seconds per size unit, for an equal share of a mean batch.
    speeds: list[float] = field(default_factory=list)  # [W]
    # Number of simulations of each preset.
    replicates: int = 0
    decision: Decision | None = None
    # None: no node is slow.
    slow_node: NodeForecast | None = None
    # False: only some presets were forecast, for example for a slow node.
    all_presets: bool = True
    # Assumptions that are not measured, as a clause for people; empty: there are none.
    assumes: str = ""
    # The option, if the forecast covers only this one, in order to check an earlier forecast; else
    # None.
    option: str | None = None

    @property
    def compares(self) -> bool:
        """Return whether presets are compared, unlike in a forecast for a single option."""
        return self.option is None and len(self.forecasts) + len(self.left_out) > 1

    def of(self, policy: str, parameters: Mapping[str, Any] | None = None) -> PresetForecast | None:
        """Return the forecast of the preset with these parameters, or None."""
        for preset in self.forecasts:
            if (preset.policy, preset.parameters) == (policy, parameters or {}):
                return preset
        return None


_FORECAST = TypeAdapter(Forecast)


def best_of(options: Iterable[PresetForecast]) -> PresetForecast | None:
    """Return the option to switch to; None if no option is clearly worth a switch.

    Options with a warning of harm, and options whose saving may be below `MARGIN`, are left out. An
    option that does not change the training is preferred, unless another option is clearly faster:
    the lower bound of its saving exceeds the saving of the preferred option.

    A forecast does not include the number of samples that are needed to reach the same loss. This
    number is larger, the longer ranks train independently, and if gradients are `stale`. If the
    fastest option changes the training, the result is therefore chosen among this option and all
    options that take at most `MARGIN` longer. Options whose ranks synchronise only at an epoch's
    end come last, after options with stale gradients. The best of the rest is the option whose
    ranks are `alone` for the fewest steps. Options that leave the training's updates unchanged
    count as 0 steps.
    """
    worth = [
        option
        for option in options
        if not option.in_force and not option.harmful and option.saving_low > MARGIN
    ]
    best = max(worth, key=lambda option: option.saving, default=None)
    identical = max(
        (option for option in worth if option.changes == "nothing"),
        key=lambda option: option.saving,
        default=None,
    )
    if best is None:
        return None
    if identical is not None and identical.saving >= best.saving_low:
        return identical
    if best.changes != "training":
        return best
    longest = (1 + MARGIN) * (1 - best.saving)
    near = [option for option in worth if 1 - option.saving <= longest]
    return min(near, key=_order)


def _order(option: PresetForecast) -> tuple[bool, bool, int, float]:
    return option.alone is None, option.stale, option.alone or 0, -option.saving


def recommended(forecast: Forecast) -> PresetForecast | None:
    """Return the best option that does not change the training's updates; see `best_of`."""
    return best_of(option for option in forecast.forecasts if option.changes != "training")


def kept(bodies: Iterable[Mapping[str, Any]]) -> list[Forecast]:
    """Parse forecasts from the database, and leave out those that are not of this version."""
    made = []
    for body in bodies:
        with suppress(ValidationError):
            made.append(_FORECAST.validate_python(body))
    return made


def label(policy: str, parameters: Mapping[str, Any]) -> str:
    """Return the label of an option: the preset, with its parameters if there are any."""
    given = ", ".join(
        f"{name} {'…' if isinstance(value, list | tuple) else value}"
        for name, value in parameters.items()
    )
    return f"{policy} ({given})" if given else policy


def words(
    option: str, saving: float, low: float, high: float, *, changes: Changes = "nothing"
) -> str:
    """Return a sentence about an option's saving; it warns if the option changes the training."""
    half = max(1, round(50 * (high - low)))
    price = _PRICES[changes]
    if low <= 0 <= high:
        return f"{option} would make no clear difference ({100 * saving:+.0f} % ± {half}){price}"
    if saving > 0:
        return f"{option} would save {100 * saving:.0f} % ± {half} of the time{price}"
    return f"{option} would take {-100 * saving:.0f} % ± {half} more time{price}"
