"""The values of a forecast; they are JSON in the table `forecasts` and over REST."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from paceline_backend.policies import Changes

log = logging.getLogger(__name__)

STEPS = 256  # newest complete steps that a forecast rests on
FEWEST = 16  # steps that a forecast needs at least
MARGIN = 0.05  # the lower bound of a saving must be above this, to be worth a switch

_PRICES: Mapping[Changes, str] = {
    "nothing": "",
    "batches": ", with other samples in a batch",
    "training": ", but change the training: the time to the same loss is not forecast",
}

Decided = Literal["stay", "wait", "recommend", "switch", "back"]


class PresetForecast(msgspec.Struct, frozen=True):
    """One preset: means over full global batches, with 95 % intervals."""

    policy: str
    parameters: dict[str, Any]
    step_time_s: float
    low_s: float
    high_s: float
    saving: float  # 1 − its time / the time of the policy in force, for the same load
    saving_low: float
    saving_high: float
    words: str
    relaxed: bool = False  # ranks do not wait for all others, so the training changes
    changes: Changes = "nothing"  # in the training
    label: str = ""  # the preset, and the parameters that differ from its defaults
    in_force: bool = False
    warnings: list[str] = []  # what to know before a switch; `insight.fitness`
    harmful: bool = False  # of the warnings, the first says that plain DDP is faster
    alone: int | None = 0  # most steps after which a rank's work reaches others; None: an epoch
    stale: bool = False  # rounds may apply gradients that were computed rounds before


class NodeForecast(msgspec.Struct, frozen=True):
    """What a step would take if a slow node's ranks were as fast as the median of the others."""

    node: str
    ranks: list[int]  # that are slow
    factor: float  # their time ÷ the others', at equal load
    step_time_s: float
    low_s: float
    high_s: float
    saving: float  # 1 − this time / the time of the policy in force, for the same load
    saving_low: float
    saving_high: float
    words: str


class LeftOut(msgspec.Struct, frozen=True):
    """A preset without a forecast, and why."""

    policy: str  # label
    reason: str


class Current(msgspec.Struct, frozen=True):
    """The policy in force."""

    policy: str
    parameters: dict[str, Any]
    version: int
    step_time_s: float | None = None  # forecast, for the same load as the presets' forecasts
    measured_s: float | None = None  # last steady steps, at a mean batch's load; None: too few
    measured_steps: int = 0


class Decision(msgspec.Struct, frozen=True):
    """What `auto` does after a forecast, and why."""

    decided: Decided
    reason: str
    policy: str | None = None  # the best other preset, or the policy to go back to
    parameters: dict[str, Any] = {}
    saving: float | None = None  # forecast for `policy`
    low: float | None = None
    high: float | None = None


class Forecast(msgspec.Struct, frozen=True):
    """The forecasts of all presets, or the `reason` why there are none."""

    run: str
    made_at: float
    current: Current
    step: int | None = None  # last of the steps that the forecast rests on
    first_step: int | None = None  # first of these steps
    steps: int = 0  # number of these steps
    fit_error: float | None = None  # |modelled time / measured time − 1|, on the same batches
    reason: str | None = None
    forecasts: list[PresetForecast] = []  # best first
    left_out: list[LeftOut] = []
    speeds: list[float] = []  # [W] s per size unit for an equal share of a mean batch
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
    return [msgspec.convert(body, Forecast) for body in bodies]


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
