"""What `auto` does after a forecast: a pure decision, on which only the advisor acts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from paceline_backend.insight.whatif.answer import (
    FEWEST,
    MARGIN,
    Decision,
    Forecast,
    PresetForecast,
    best_of,
    label,
)
from paceline_backend.store.switches import Switch

BY = "auto"  # who requests its switches
AUTO_STEPS = 100  # between two forecasts, and over so many a saving of `MARGIN` must hold
FIRST_STEP = 24  # the first forecast is made here: a few cold steps, `FEWEST`, and some to spare
HOLD_STEPS = 100  # steps without another switch after a switch
CHANGED = 0.25  # a larger change of a rank's speed makes earlier experience with presets void

Mode = Literal["recommend", "switch"]


def decide(
    forecast: Forecast,
    earlier: Sequence[Forecast],
    switches: Sequence[Switch],
    mode: Mode,
    *,
    relaxed: bool = False,
) -> Decision:
    """Stays, recommends or switches, or goes back.

    `best_of` chooses among the presets that may be chosen, as for the page's recommendation. The
    chosen preset must save more than `MARGIN` in all forecasts back to `steps_to_hold` before, too.

    After a switch by `auto`, the measured time is compared with the forecast. If the policy takes
    longer than the interval allowed and saves less than `MARGIN`, `auto` goes back to the policy
    before. If the policy changes the training, and a preset that does not surely takes less than
    `MARGIN` longer, `auto` takes that preset.

    `auto` does not choose again a policy that it left, nor one that it chose and a user then left,
    until a rank's speed has changed. Otherwise it could switch back and forth.

    Args:
        forecast: the newest, made under the newest of `switches`.
        earlier: the forecasts with a decision, oldest first.
        switches: all, oldest first.
        mode: "recommend": say what to do, but do not switch.
        relaxed: also choose presets under which ranks do not wait for all others. These change the
            training, because gradients come late or replicas differ.
    """
    if forecast.reason is not None:
        return _without_preset("wait", forecast.reason)
    last = switches[-1]
    assert forecast.step is not None
    if last.effective_step is None:
        return _without_preset("wait", f"the switch to {last.policy} has yet to take effect")
    if last.by == BY and (verdict := _verdict(forecast, earlier, switches, mode)):
        return verdict
    if last.version > 0 and forecast.step < last.effective_step + HOLD_STEPS:
        return _without_preset(
            "wait", f"less than {HOLD_STEPS} steps since the switch to {last.policy}"
        )
    if last.by == BY and (unchanged := _unchanged_again(forecast)):
        why = (
            f"{unchanged.label} leaves the training as it is, for less than {MARGIN:.0%} more time"
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
        return _with(best, "wait", f"{best.words}, if the next forecast says so too")
    return _with(best, mode, best.words)


def steps_to_hold(promise: PresetForecast) -> int:
    """Over how many steps all forecasts must promise a saving before `auto` acts on it.

    To wait costs the saving. So waiting for a large saving may cost no more than `AUTO_STEPS` cost
    where `MARGIN` is saved. `FEWEST` steps must be new. What changes the training must hold for
    `AUTO_STEPS`: a run's first steps are often slow, and the training would stay changed.

    Args:
        promise: its saving is surely above `MARGIN`.
    """
    if promise.changes == "training":
        return AUTO_STEPS
    return max(FEWEST, math.ceil(AUTO_STEPS * MARGIN / promise.saving_low))


def _unchanged_again(forecast: Forecast) -> PresetForecast | None:
    """What may take the place of a preset that changes the training, as that is not worth it.

    A run's first steps, or a passing slowness, may have made it look better than it is.
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
    """Whether all forecasts back to `steps_to_hold` before promise a saving above `MARGIN`, too.

    They must be made under the same policy and at the same speeds. Forecasts may lie closer
    together: a worker makes one as soon as it takes a run over, or as `auto` is turned on.
    """
    assert forecast.step is not None
    for before in reversed(earlier):
        same_policy = before.current.version == forecast.current.version
        if not (same_policy and same_conditions(before, forecast)):
            return False
        promised = before.of(best.policy, best.parameters)
        if promised is None:  # another option was forecast by itself
            continue
        if promised.saving_low <= MARGIN:
            return False
        assert before.step is not None
        # A forecast with a later step is of an earlier attempt.
        if not forecast.step - steps_to_hold(best) < before.step <= forecast.step:
            return True
    return False


def _verdict(
    forecast: Forecast, earlier: Sequence[Forecast], switches: Sequence[Switch], mode: Mode
) -> Decision | None:
    """Whether to wait for the result of `auto`'s last switch, or to undo it; None: neither."""
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
        return _without_preset("wait", f"{last.policy} has yet to show what it takes")
    saved = 1 - measured / made.current.step_time_s
    if measured <= promised.high_s or saved >= MARGIN:
        return None
    why = (
        f"{last.policy} saves {saved:.0%} where {promised.saving_low:.0%} to "
        f"{promised.saving_high:.0%} were forecast"
    )
    return Decision("back", why, before.policy, before.parameters, saved, None, None)


def _judged(forecast: Forecast) -> bool:
    """Whether this forecast's decision judged the policy in force."""
    return forecast.decision is not None and forecast.decision.decided != "wait"


def _barred(
    forecast: Forecast, earlier: Sequence[Forecast], switches: Sequence[Switch]
) -> set[str]:
    """Labels of what a switch of `auto` left, or what `auto` chose and then a user left."""
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
    """Whether each rank was about as fast in both forecasts."""
    return len(first.speeds) == len(second.speeds) and all(
        min(a, b) > 0 and abs(math.log(a / b)) <= math.log(1 + CHANGED)
        for a, b in zip(first.speeds, second.speeds, strict=True)
    )
