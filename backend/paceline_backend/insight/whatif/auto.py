"""Decision of `auto` after a forecast: stay, wait, recommend, switch or go back.

`decide` is a pure function; only the advisor (`control.advice`) acts on its result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from paceline_backend.insight.whatif.answer import (
    FEWEST_FORECAST_STEPS,
    MARGIN,
    Decision,
    Forecast,
    PresetForecast,
    best_of,
    label,
)
from paceline_backend.insight.whatif.thresholds import THRESHOLDS
from paceline_backend.store.switches import Switch

# Author of the switches that `auto` makes.
BY = "auto"
# Forecasts are made at intervals of this many steps. A saving just above `MARGIN` must be forecast
# for this many steps before `auto` acts on it; see `steps_to_hold`.
AUTO_STEPS = 100  # steps
# The first forecast is made at this step. It needs `FEWEST_FORECAST_STEPS` complete steps after the
# first few steps, which include one-time work.
FIRST_STEP = 24

Mode = Literal["recommend", "switch"]


def decide(
    forecast: Forecast,
    earlier: Sequence[Forecast],
    switches: Sequence[Switch],
    mode: Mode,
    *,
    relaxed: bool = False,
) -> Decision:
    """Decide whether to stay, wait, recommend, switch or go back.

    `best_of` chooses among the permitted presets. In addition, all forecasts of the last
    `steps_to_hold` steps must promise a saving above `MARGIN` for the chosen preset.

    After a switch by `auto`, the measured time is compared with the forecast. If the measured step
    time is above the forecast's interval and the saving is below `MARGIN`, `auto` goes back to the
    previous policy. If the policy changes the training, and a preset that does not change it is
    certainly less than `MARGIN` slower, `auto` switches to that preset.

    To avoid switching back and forth, `auto` does not choose again a policy that it left, or that
    it chose and a user then left, until a rank's speed has changed.

    `forecast` must be made under the newest of `switches`. `earlier` holds the earlier forecasts
    for which `auto` made a decision. Both sequences are sorted, oldest first. In mode "recommend"
    the result is never a switch. Presets with relaxed synchronisation change the training, so they
    are chosen only if `relaxed` is true.
    """
    if forecast.reason is not None:
        return _without_preset("wait", forecast.reason)
    last = switches[-1]
    assert forecast.step is not None
    if last.effective_step is None:
        return _without_preset("wait", f"the switch to {last.policy} has not taken effect yet")
    if last.by == BY and (verdict := _verdict(forecast, earlier, switches, mode)):
        return verdict
    if last.version > 0 and forecast.step < last.effective_step + THRESHOLDS.hold_steps:
        return _without_preset(
            "wait",
            f"fewer than {THRESHOLDS.hold_steps} steps since the switch to {last.policy}",
        )
    if last.by == BY and (unchanged := _unchanged_again(forecast)):
        why = (
            f"{unchanged.label} does not change the training, for less than {MARGIN:.0%} more time"
        )
        return _with(unchanged, mode, why)
    barred = _barred(forecast, earlier, switches)
    barred.add(label(forecast.current.policy, forecast.current.parameters))
    others = [
        preset
        for preset in forecast.forecasts
        if label(preset.policy, preset.parameters) not in barred
        and not preset.harmful
        and (relaxed or not preset.relaxed)
    ]
    if not others:
        return _without_preset("stay", "there is no other preset to switch to")
    best = best_of(others)
    if best is None:
        why = f"{others[0].words}: not clearly more than {MARGIN:.0%}"
        return _with(others[0], "stay", why)
    if not _promised_before(best, forecast, earlier):
        return _with(best, "wait", f"{best.words}, if the next forecast confirms it")
    return _with(best, mode, best.words)


def steps_to_hold(promise: PresetForecast) -> int:
    """Return the number of steps for which forecasts must promise a saving before `auto` acts.

    While `auto` waits, the saving is lost. So the number is smaller for a larger saving:
    `AUTO_STEPS` × `MARGIN` ÷ `promise.saving_low`. The number is at least `FEWEST_FORECAST_STEPS`,
    so that the last forecast is based on at least this many steps that are newer than the first
    forecast. For a preset that changes the training, the number is `AUTO_STEPS`, because a run's
    first steps are often slow, and the change to the training would be permanent.

    `promise.saving_low` must be above `MARGIN`.
    """
    if promise.changes == "training":
        return AUTO_STEPS
    return max(FEWEST_FORECAST_STEPS, math.ceil(AUTO_STEPS * MARGIN / promise.saving_low))


def _unchanged_again(forecast: Forecast) -> PresetForecast | None:
    """If the policy in force changes the training with little benefit, return a replacement.

    The replacement does not change the training, and is less than `MARGIN` slower. None: there is
    none, or the policy in force does not change the training. A run's first steps, or temporary
    slowness, may have made the policy look better than it is when `auto` chose it.
    """
    if all(option.changes != "training" for option in forecast.forecasts if option.in_force):
        return None
    near = [
        option
        for option in forecast.forecasts
        if option.changes == "nothing" and not option.harmful and option.saving_low > -MARGIN
    ]
    return max(near, key=lambda option: option.saving, default=None)


def _with(best: PresetForecast, decided: Literal["stay", "wait"] | Mode, why: str) -> Decision:
    return Decision(
        decided,
        why,
        best.policy,
        best.parameters,
        best.saving,
        best.saving_low,
        best.saving_high,
    )


def _without_preset(decided: Literal["stay", "wait"], why: str) -> Decision:
    return Decision(decided, why, None, {}, None, None, None)


def _promised_before(best: PresetForecast, forecast: Forecast, earlier: Sequence[Forecast]) -> bool:
    """Return whether all forecasts of the last `steps_to_hold` steps promise a saving for `best`.

    Each saving must be above `MARGIN`. The forecasts must be made under the same policy and at the
    same speeds. Forecasts may be closer together than `AUTO_STEPS`: a worker process makes one when
    it takes over a run, or when `auto` is enabled.
    """
    assert forecast.step is not None
    for before in reversed(earlier):
        same_policy = before.current.version == forecast.current.version
        if not (same_policy and same_conditions(before, forecast)):
            return False
        promised = before.of(best.policy, best.parameters)
        # `before` is a forecast for a single option, which is not `best`.
        if promised is None:
            continue
        if promised.saving_low <= MARGIN:
            return False
        assert before.step is not None
        # A forecast with a later step belongs to an earlier attempt.
        if not forecast.step - steps_to_hold(best) < before.step <= forecast.step:
            return True
    return False


def _verdict(
    forecast: Forecast, earlier: Sequence[Forecast], switches: Sequence[Switch], mode: Mode
) -> Decision | None:
    """If `auto` made the last switch, return the decision to wait for its result or to go back.

    None if there is nothing to decide, for example if the result has been judged already.
    """
    if len(switches) < 2 or mode == "recommend":
        return None
    before, last = switches[-2:]
    made = _newest(earlier, before.version)
    if made is None or made.decision is None or made.decision.decided != "switch":
        return None
    if any(kept.current.version == last.version and _judged(kept) for kept in earlier):
        return None
    promised = made.of(last.policy, last.parameters)
    if promised is None or made.current.step_time_s is None or not same_conditions(made, forecast):
        return None
    measured = forecast.current.measured_s
    if measured is None:
        return _without_preset("wait", f"the step time under {last.policy} is not known yet")
    saved = 1 - measured / made.current.step_time_s
    if measured <= promised.high_s or saved >= MARGIN:
        return None
    why = (
        f"{last.policy} saves {saved:.0%} where {promised.saving_low:.0%} to "
        f"{promised.saving_high:.0%} were forecast"
    )
    return Decision("back", why, before.policy, before.parameters, saved, None, None)


def _judged(forecast: Forecast) -> bool:
    return forecast.decision is not None and forecast.decision.decided != "wait"


def _barred(
    forecast: Forecast, earlier: Sequence[Forecast], switches: Sequence[Switch]
) -> set[str]:
    """Return the labels of policies that `auto` left, or that `auto` chose and a user then left."""
    barred = set()
    for switch, following in pairwise(switches):
        if BY in (switch.by, following.by):
            made = _newest(earlier, switch.version)
            if made is None or same_conditions(made, forecast):
                barred.add(label(switch.policy, switch.parameters))
    return barred


def _newest(earlier: Sequence[Forecast], version: int) -> Forecast | None:
    of_version = [
        forecast for forecast in earlier if forecast.current.version == version and forecast.speeds
    ]
    return of_version[-1] if of_version else None


def same_conditions(first: Forecast, second: Forecast) -> bool:
    """Return whether each rank had about the same speed in both forecasts."""
    return len(first.speeds) == len(second.speeds) and all(
        min(a, b) > 0 and abs(math.log(a / b)) <= math.log(1 + THRESHOLDS.changed_conditions)
        for a, b in zip(first.speeds, second.speeds, strict=True)
    )
