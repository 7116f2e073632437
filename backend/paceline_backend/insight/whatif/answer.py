"""Values of a forecast, which are stored as JSON in the table `forecasts` and sent over REST."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import field
from typing import Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from paceline.policies import Changes

# Number of the newest complete steps that a forecast uses.
FORECAST_STEPS = 256
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
    """Forecast of the step time under an option: a preset with parameters."""

    policy: str = Field(examples=["chronica"])
    parameters: dict[str, Any] = Field(
        description="parameters of the preset; {}: the defaults", examples=[{}]
    )
    step_time_s: float = Field(
        description="forecast of the mean step time, at the load of a mean batch, seconds",
        examples=[0.25],
    )
    low_s: float = Field(
        description="lower bound of the 95 % interval of `step_time_s`", examples=[0.24]
    )
    high_s: float = Field(
        description="upper bound of the 95 % interval of `step_time_s`", examples=[0.26]
    )
    saving: float = Field(description="1 − step_time_s ÷ forecast step time of the policy in force")
    saving_low: float = Field(
        description="lower bound of the 95 % interval of `saving`", examples=[0.36]
    )
    saving_high: float = Field(
        description="upper bound of the 95 % interval of `saving`", examples=[0.41]
    )
    words: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    relaxed: bool = Field(
        description="true if ranks need not wait for all other ranks in each step, which changes "
        "the training"
    )
    changes: Changes = Field(
        description="effect of the preset on the training, compared with plain DDP. nothing: the "
        "same updates; batches: other samples share a global batch; training: gradients may be "
        "old or dropped, and replicas may differ"
    )
    label: str = Field(
        description="name of the preset, with the parameters that are not left at their defaults",
        examples=["paceline (mode free)"],
    )
    in_force: bool = Field(description="true if the forecast is for the policy in force")
    warnings: list[str] = Field(
        description="warnings about a switch to the preset; a warning that the preset is slower "
        "than plain DDP comes first",
        examples=[[]],
    )
    harmful: bool = Field(
        description="true if plain DDP is faster, so that `auto` never chooses the preset"
    )
    alone: int | None = Field(
        description="maximum number of steps or rounds before other ranks receive a rank's "
        "updates; null: only at the end of an epoch",
        examples=[0],
    )
    stale: bool = Field(
        description="true if a round may apply gradients that were computed in earlier rounds"
    )


@dataclass(frozen=True)
class Saving:
    """Forecast of the step time if a slow node were as fast as the other nodes."""

    step_time_s: float = Field(
        description="forecast of the mean step time without the node's slowness, seconds",
        examples=[0.11],
    )
    low_s: float = Field(
        description="lower bound of the 95 % interval of `step_time_s`", examples=[0.1]
    )
    high_s: float = Field(
        description="upper bound of the 95 % interval of `step_time_s`", examples=[0.12]
    )
    saving: float = Field(
        description="1 − step_time_s ÷ forecast step time with the slow node", examples=[0.6]
    )
    saving_low: float = Field(
        description="lower bound of the 95 % interval of `saving`", examples=[0.57]
    )
    saving_high: float = Field(
        description="upper bound of the 95 % interval of `saving`", examples=[0.63]
    )
    words: str = Field(
        examples=["if n2 were as fast as the others, steps would take 60 % ± 3 less time"]
    )


@dataclass(frozen=True)
class NodeForecast(Saving):
    """A `Saving`, with the slow node, its slow ranks, and the factor by which they are slower."""

    node: str = Field(examples=["n2"])
    ranks: list[int] = Field(description="slow ranks of the node", examples=[[2, 3]])
    factor: float = Field(
        description="computing time of the slow ranks ÷ computing time of the other ranks, at "
        "equal load",
        examples=[3.0],
    )


@dataclass(frozen=True)
class LeftOut:
    """Preset that could not be forecast."""

    policy: str = Field(examples=["ep4ddl"])
    reason: str = Field(description="why the preset could not be forecast")


@dataclass(frozen=True)
class PolicyInForce:
    """Policy in force, the reference for all savings."""

    policy: str = Field(examples=["bsp"])
    parameters: dict[str, Any] = Field(examples=[{}])
    version: int = Field(examples=[0])
    step_time_s: float | None = Field(
        description="forecast of the mean step time under the policy in force, at the load of a "
        "mean batch, seconds; null: no forecast",
        examples=[0.41],
    )
    measured_s: float | None = Field(
        description="mean step time under the policy in force, measured after its warm-up and "
        "converted to the load of a mean batch, seconds; null: too few steps",
        examples=[0.42],
    )
    measured_steps: int = Field(
        description="number of the measured steps after the warm-up of the policy in force",
        examples=[64],
    )


@dataclass(frozen=True)
class Decision:
    """Decision of `auto` about a forecast."""

    decided: Decided = Field(examples=["switch"])
    reason: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    policy: str | None = Field(
        description="preset that the decision is about, even if `auto` does not switch to it; "
        "null: the decision is about no preset",
        examples=["chronica"],
    )
    parameters: dict[str, Any] = Field(examples=[{}])
    saving: float | None = Field(
        description="fraction of the step time that `policy` saves; null: unknown",
        examples=[0.38],
    )
    low: float | None = Field(
        description="lower bound of the 95 % interval of `saving`; null: unknown", examples=[0.36]
    )
    high: float | None = Field(
        description="upper bound of the 95 % interval of `saving`; null: unknown", examples=[0.41]
    )


@dataclass(frozen=True)
class Forecast:
    """Forecasts for all presets, or the `reason` why there are none."""

    run: str
    made_at: float
    current: PolicyInForce
    # Last and first of the measured steps that the forecast uses, and their number.
    step: int | None = None
    first_step: int | None = None
    steps: int = 0
    # |Modelled time ÷ measured time − 1| of the batches that ran.
    fit_error: float | None = None
    reason: str | None = None
    # Sorted by saving, the largest first.
    forecasts: list[PresetForecast] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    # Each rank's seconds per size unit if a mean global batch is divided equally.
    speeds: list[float] = field(default_factory=list)  # [W]
    # Number of simulations of each preset.
    replicates: int = 0
    decision: Decision | None = None
    # None: no node is slow.
    slow_node: NodeForecast | None = None
    # False: the request was for some presets only, or excluded presets that change the training.
    all_presets: bool = True
    # Assumptions that are not measured, as a clause for users; empty: there are none.
    assumes: str = ""
    # Label of an option, if this forecast was made only to check an earlier forecast of that
    # option. None: the forecast has another purpose.
    option: str | None = None

    @property
    def compares(self) -> bool:
        """Return whether the forecast compares presets; a forecast for one `option` does not."""
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

    Options with a warning of harm, and options whose saving may be below `MARGIN`, are left out.
    Options with the same updates as plain DDP take precedence: the fastest of them is returned,
    unless its saving is below the lower bound of the saving of the fastest option of all.

    A forecast does not predict how many samples are needed to reach the same loss. More samples are
    needed if ranks train independently for longer, or if gradients are `stale`. If the fastest
    option changes the training, the result is therefore chosen among this option and all options
    that take at most `MARGIN` longer. Of these options, options whose ranks synchronise only at an
    epoch's end are chosen last, and options with stale gradients second to last. Of the remaining
    options, the option whose ranks are `alone` for the fewest steps is chosen. With an all-reduce
    in each step, `alone` is 0.
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
    """Return the best option whose `changes` is not "training"; see `best_of`."""
    return best_of(option for option in forecast.forecasts if option.changes != "training")


def kept(bodies: Iterable[Mapping[str, Any]]) -> list[Forecast]:
    """Parse forecasts from the database; leave out forecasts in the format of another version."""
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
    """Return a clause about an option's saving, with a warning if it changes the training."""
    half = max(1, round(50 * (high - low)))
    price = _PRICES[changes]
    if low <= 0 <= high:
        return f"{option} would make no clear difference ({100 * saving:+.0f} % ± {half}){price}"
    if saving > 0:
        return f"{option} would save {100 * saving:.0f} % ± {half} of the time{price}"
    return f"{option} would take {-100 * saving:.0f} % ± {half} more time{price}"
