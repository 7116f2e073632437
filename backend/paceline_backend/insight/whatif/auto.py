"""What `auto` makes of a run's forecasts: a pure decision, on which only the advisor acts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from paceline_backend.insight.whatif.answer import Decision, Forecast, PresetForecast
from paceline_backend.store.switches import Switch

BY = "auto"  # who requests its switches
MARGIN = 0.05  # what a switch must save at least: the lower bound of the interval,
AUTO_STEPS = 100  # in forecasts so many steps apart, and those between them,
HOLD_STEPS = 100  # and not within so many steps of another switch
CHANGED = 0.25  # a rank's speed is off by more than this: what was learned about presets is void

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

    A preset is chosen when the lower bounds of its saving in this forecast and all back to one at
    least `AUTO_STEPS` before are above `MARGIN`. After a switch by `auto`, what the policy takes is
    compared with what was promised: where it takes longer than the interval allowed and saves less
    than `MARGIN`, the policy before comes back. What `auto` left, and what somebody left for good
    after `auto` chose it, is not chosen again until a rank's speed has changed: so it never goes
    back and forth.

    Args:
        forecast: the newest, made under the newest of `switches`.
        earlier: those that were decided upon, oldest first.
        switches: all, oldest first.
        mode: "recommend": it only says what it would do.
        relaxed: presets under which ranks do not wait for all others may be chosen, too: gradients
            are late under them, or replicas differ, so that the training is another.
    """
    if forecast.reason is not None:
        return Decision("wait", forecast.reason)
    last = switches[-1]
    assert forecast.step is not None
    if last.effective_step is None:
        return Decision("wait", f"the switch to {last.policy} has yet to take effect")
    if last.by == BY and (verdict := _verdict(forecast, earlier, switches, mode)):
        return verdict
    if last.version > 0 and forecast.step < last.effective_step + HOLD_STEPS:
        return Decision("wait", f"less than {HOLD_STEPS} steps since the switch to {last.policy}")
    barred = _barred(forecast, earlier, switches)
    in_force = forecast.current.policy
    barred.add(in_force)
    others = (preset for preset in forecast.forecasts if preset.policy not in barred)
    best = next((preset for preset in others if relaxed or not preset.relaxed), None)
    if best is None:
        return Decision("stay", "there is no other preset to switch to")
    if best.saving_low <= MARGIN:
        why = f"{best.words}: not clearly more than {MARGIN:.0%}"
        return _with(best, "stay", why)
    if not _promised_before(best.policy, forecast, earlier):
        return _with(best, "wait", f"{best.words}, if the next forecast says so too")
    return _with(best, mode, best.words)


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


def _promised_before(policy: str, forecast: Forecast, earlier: Sequence[Forecast]) -> bool:
    """Whether all forecasts back to one `AUTO_STEPS` before say so too.

    Of the same policy in force, and like speeds. They may be closer to each other than that: a
    worker that takes over looks at once, and so does one whose `auto` is turned on again.
    """
    assert forecast.step is not None
    for earlier_forecast in reversed(earlier):
        promised = earlier_forecast.of(policy)
        if (
            earlier_forecast.current.version != forecast.current.version
            or promised is None
            or promised.saving_low <= MARGIN
            or not same_conditions(earlier_forecast, forecast)
        ):
            return False
        assert earlier_forecast.step is not None
        # A later step than this one's is an attempt before.
        if not forecast.step - AUTO_STEPS < earlier_forecast.step <= forecast.step:
            return True
    return False


def _verdict(
    forecast: Forecast, earlier: Sequence[Forecast], switches: Sequence[Switch], mode: Mode
) -> Decision | None:
    """Whether to wait for, or take back, what `auto` did last; None: it is as it should be."""
    if len(switches) < 2 or mode == "recommend":
        return None
    before, last = switches[-2:]
    made = _newest(earlier, before.version)
    if made is None or made.decision is None or made.decision.decided != "switch":
        return None
    if any(
        earlier_forecast.current.version == last.version and _judged(earlier_forecast)
        for earlier_forecast in earlier
    ):
        return None
    promised = made.of(last.policy)
    if promised is None or made.current.step_time_s is None or not same_conditions(made, forecast):
        return None
    measured = forecast.current.measured_s
    if measured is None:
        return Decision("wait", f"{last.policy} has yet to show what it takes")
    saved = 1 - measured / made.current.step_time_s
    if measured <= promised.high_s or saved >= MARGIN:
        return None
    why = (
        f"{last.policy} saves {saved:.0%} where {promised.saving_low:.0%} to "
        f"{promised.saving_high:.0%} were forecast"
    )
    return Decision("back", why, before.policy, before.parameters, saved)


def _judged(forecast: Forecast) -> bool:
    """Whether the policy in force had been judged by then."""
    return forecast.decision is not None and forecast.decision.decided != "wait"


def _barred(
    forecast: Forecast, earlier: Sequence[Forecast], switches: Sequence[Switch]
) -> set[str]:
    """Presets that a switch by `auto`, or one from what it chose, has left."""
    left = set()
    for switch, following in pairwise(switches):
        if BY in (switch.by, following.by):
            then = _newest(earlier, switch.version)
            if then is None or same_conditions(then, forecast):
                left.add(switch.policy)
    return left


def _newest(earlier: Sequence[Forecast], version: int) -> Forecast | None:
    of_version = [
        forecast for forecast in earlier if forecast.current.version == version and forecast.speeds
    ]
    return of_version[-1] if of_version else None


def same_conditions(forecast: Forecast, other: Forecast) -> bool:
    """Whether all ranks were about as fast."""
    return len(forecast.speeds) == len(other.speeds) and all(
        min(a, b) > 0 and abs(math.log(a / b)) <= math.log(1 + CHANGED)
        for a, b in zip(forecast.speeds, other.speeds, strict=True)
    )
