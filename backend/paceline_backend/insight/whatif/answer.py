"""The values of a forecast; they are JSON in the table `forecasts` and over REST."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any, Literal

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from paceline_backend.policies import Changes

STEPS = 256  # newest complete steps that a forecast rests on
FEWEST = 16  # steps that a forecast needs at least
MARGIN = 0.05  # the lower bound of a saving must be above this, to be worth a switch

_PRICES: Mapping[Changes, str] = {
    "nothing": "",
    "batches": ", with other samples in a batch",
    "training": ", but change the training: the time to the same loss is not forecast",
}

Decided = Literal["stay", "wait", "recommend", "switch", "back"]


@dataclass(frozen=True)
class PresetForecast:
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
    changes: Changes = Field(
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


@dataclass(frozen=True)
class Saving:
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


@dataclass(frozen=True)
class NodeForecast(Saving):
    """What a step would take if a slow node's ranks were as fast as the median of the others."""

    node: str = Field(examples=["n2"])
    ranks: list[int] = Field(description="that are slow", examples=[[2, 3]])
    factor: float = Field(description="their time ÷ the others', at equal load", examples=[3.0])


@dataclass(frozen=True)
class LeftOut:
    """A preset of which nothing can be said."""

    policy: str = Field(examples=["ep4ddl"])
    reason: str = Field()


@dataclass(frozen=True)
class PolicyInForce:
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


@dataclass(frozen=True)
class Decision:
    """What `auto` made of a forecast; savings as ratios."""

    decided: Decided = Field(examples=["switch"])
    reason: str = Field(examples=["chronica would save 38 % ± 2 of the time"])
    policy: str | None = Field(description="the one to go on with", examples=["chronica"])
    parameters: dict[str, Any] = Field(examples=[{}])
    saving: float | None = Field(examples=[0.38])
    low: float | None = Field(examples=[0.36])
    high: float | None = Field(examples=[0.41])


@dataclass(frozen=True)
class Forecast:
    """The forecasts of all presets, or the `reason` why there are none."""

    run: str
    made_at: float
    current: PolicyInForce
    step: int | None = None  # last of the steps that the forecast rests on
    first_step: int | None = None  # first of these steps
    steps: int = 0  # number of these steps
    fit_error: float | None = None  # |modelled time / measured time − 1|, on the same batches
    reason: str | None = None
    forecasts: list[PresetForecast] = field(default_factory=list)  # best first
    left_out: list[LeftOut] = field(default_factory=list)
    speeds: list[float] = field(
        default_factory=list
    )  # [W] s per size unit for an equal share of a mean batch
    replicates: int = 0  # simulations of each preset
    decision: Decision | None = None
    slow_node: NodeForecast | None = None  # None: no node is named slow
    all_presets: bool = True  # False: some presets only, as for a slow node
    assumes: str = ""  # what nobody measured: a clause for people; empty: nothing
    option: str | None = None  # the only one that was to be forecast, as it was promised before

    @property
    def compares(self) -> bool:
        """Whether presets stand beside the policy in force: it is not of a node or a promise."""
        return self.option is None and len(self.forecasts) + len(self.left_out) > 1

    def of(self, policy: str, parameters: Mapping[str, Any] | None = None) -> PresetForecast | None:
        """The forecast of the preset with these parameters (none: its defaults), or None."""
        for preset in self.forecasts:
            if (preset.policy, preset.parameters) == (policy, parameters or {}):
                return preset
        return None


_FORECAST = TypeAdapter(Forecast)


def best_of(options: Iterable[PresetForecast]) -> PresetForecast | None:
    """The option to switch to; None: no option is clearly worth it.

    An option that leaves the training as it is goes first, unless another is clearly faster: its
    saving is above what the identical option would save. Options with a warning of harm and those
    whose saving may be below `MARGIN` are left out.

    No forecast knows how many samples the same loss needs. It is more of them, the longer ranks
    train without each other, and where gradients are `stale`. So if the fastest option changes the
    training, another that takes at most `MARGIN` longer may go before it. Last are those whose
    ranks meet only at an epoch's end, and before these those with stale gradients. Among the rest
    the first is the one under which ranks are `alone` for the fewest steps. Options that leave the
    training's updates alone count as 0.
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
    """What sorts options that take about as long: the first is preferred; see `best_of`."""
    return option.alone is None, option.stale, option.alone or 0, -option.saving


def recommended(forecast: Forecast) -> PresetForecast | None:
    """What to switch to without changing the training's updates, by `best_of`."""
    return best_of(option for option in forecast.forecasts if option.changes != "training")


def kept(bodies: Iterable[Mapping[str, Any]]) -> list[Forecast]:
    """Return forecasts from the database."""
    return [_FORECAST.validate_python(body) for body in bodies]


def label(policy: str, parameters: Mapping[str, Any]) -> str:
    """How an option is called: the preset, with its parameters if they are given."""
    given = ", ".join(
        f"{name} {'…' if isinstance(value, list | tuple) else value}"
        for name, value in parameters.items()
    )
    return f"{policy} ({given})" if given else policy


def words(
    option: str, saving: float, low: float, high: float, *, changes: Changes = "nothing"
) -> str:
    """The sentence about an option's saving, in percent of the time.

    Nothing is forecast of the loss. For an option that changes the training, the sentence says so.
    """
    half = max(1, round(50 * (high - low)))
    price = _PRICES[changes]
    if low <= 0 <= high:
        return f"{option} would make no clear difference ({100 * saving:+.0f} % ± {half}){price}"
    if saving > 0:
        return f"{option} would save {100 * saving:.0f} % ± {half} of the time{price}"
    return f"{option} would take {-100 * saving:.0f} % ± {half} more time{price}"
