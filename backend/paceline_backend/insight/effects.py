"""Measured effects of policy switches: the time for the same load, before and after.

The first steps of a policy, in which it learns the ranks' speeds, are left out. A difference counts
as known once its 95 % interval excludes zero. If no later step can change an effect, the stored
effect is returned, even if its steps have been deleted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from paceline import policies
from paceline.policies.base import Floats
from paceline_backend.insight.report import WARMUP_STEPS
from paceline_backend.insight.whatif.answer import Forecast, PolicyInForce, PresetForecast, kept
from paceline_backend.store import Connection, Store, attempts, records, runs, switches
from paceline_backend.store.outcomes import effects as kept_effects
from paceline_backend.store.outcomes import forecasts
from paceline_backend.store.switches import Switch

# --- Thresholds of comparisons; tests/integration/insight/test_effects.py checks them.

# Maximum and minimum number of steps that are compared before a switch, and after it.
MOST_EFFECT_STEPS = 200  # steps
FEWEST_STEPS = 8  # steps
# Standard errors are computed from sums over blocks of this many steps, because the errors of
# neighbouring steps may depend on each other.
_BLOCK_STEPS = 4  # steps
# Half-width of a 95 % interval in standard errors: quantile of Student's t distribution for about
# 20 blocks.
_T_QUANTILE = 2.1  # standard errors


@dataclass(frozen=True)
class ExpectedEffect:
    """Forecast of a switch's effect, made before the switch."""

    saving: float = Field(
        description="forecast saving: 1 − (time per unit of load after ÷ before the switch)",
        examples=[0.55],
    )
    low: float = Field(
        description="lower bound of the 95 % interval of the forecast saving", examples=[0.52]
    )
    high: float = Field(
        description="upper bound of the 95 % interval of the forecast saving", examples=[0.58]
    )


@dataclass(frozen=True)
class SwitchEffect:
    """Measured effect of a switch on the time for the same load, without the warm-up steps."""

    version: int = Field(examples=[1])
    policy: str = Field(examples=["chronica"])
    first_step: int = Field(description="first step that the policy planned", examples=[64])
    before_steps: int = Field(
        description="number of compared steps before the switch", examples=[44]
    )
    after_steps: int = Field(
        description="number of compared steps after the switch", examples=[100]
    )
    known: bool = Field(description="true if the 95 % interval of `saving` excludes zero")
    saving: float | None = Field(
        description="measured saving: 1 − (time per unit of load after ÷ before the switch); "
        "null: too few steps",
        examples=[0.56],
    )
    low: float | None = Field(
        description="lower bound of the 95 % confidence interval of `saving`", examples=[0.53]
    )
    high: float | None = Field(
        description="upper bound of the 95 % confidence interval of `saving`", examples=[0.58]
    )
    forecast: ExpectedEffect | None = Field(
        description="newest forecast of the effect, made before the switch; null: there was none"
    )
    replaced: bool = Field(description="true if a later switch has replaced this policy")
    complete: bool = Field(description="true if no later step can change the measured effect")
    unchanged: bool = Field(
        description="true if the switch changed neither policy nor parameters, so no effect is "
        "measured"
    )


def words_of(effect: SwitchEffect) -> str:
    """Return a sentence about the measured effect of a switch, and one about its forecast."""
    if effect.unchanged:
        return "Policy and parameters stayed the same, so no effect is measured."
    said = ""
    if effect.forecast is not None:
        half = 50 * (effect.forecast.high - effect.forecast.low)
        said = f" The forecast was {_change(effect.forecast.saving)} ± {max(half, 1):.0f}."
    if effect.saving is None or effect.low is None or effect.high is None:
        if effect.before_steps < FEWEST_STEPS:
            few = f"only {effect.before_steps} steps before the switch count"
            return f"Its effect cannot be measured: {few}, {FEWEST_STEPS} are needed.{said}"
        if effect.replaced:
            few = f"only {effect.after_steps} of its steps count"
            return f"Its effect cannot be measured: {few}, {FEWEST_STEPS} are needed.{said}"
        text = f"it needs {WARMUP_STEPS} steps to learn and {FEWEST_STEPS} more"
        return f"Its effect is not known yet: {text}.{said}"
    if not effect.known:
        between = f"between {_change(effect.low)} and {_change(effect.high)}"
        steps = f"after {effect.after_steps:,} steps"
        if effect.complete:
            return f"It made no clear difference: {between} for the same load, {steps}.{said}"
        return f"Its effect is not known yet: {between} for the same load, {steps}.{said}"
    bounds = sorted((abs(effect.low), abs(effect.high)))
    range_ = f"{100 * bounds[0]:.0f} to {100 * bounds[1]:.0f} %"
    return f"Steps take {_change(effect.saving)} for the same load ({range_}).{said}"


def effects_of(connection: Connection, run: int) -> list[SwitchEffect]:
    """Return the effect of each switch that has taken effect, oldest first."""
    history = switches.history(connection, run)
    changes = [change for change in history if change.version and change.effective_step is not None]
    if not changes:
        return []
    replaced = [next((change for change in history if not change.version), None), *changes]
    made = kept(forecasts.bodies(connection, run))
    stored = kept_effects.of_run(connection, run)
    newest = forecasts.newest_step(connection, run)
    firsts = [change.effective_step or 0 for change in changes]
    effects = []
    for change, old_policy, before, first, end in zip(
        changes, replaced, [0, *firsts], firsts, [*firsts[1:], None], strict=False
    ):
        if old_policy is not None and _same(old_policy, change):
            effects.append(_unscored(change, replaced=end is not None))
            continue
        body = stored.get(change.version)
        earlier = None if body is None or body["first_step"] != first else _from_body(body)
        if earlier is not None and earlier.complete:
            effects.append(earlier)
            continue
        settled = first + WARMUP_STEPS
        last = settled + MOST_EFFECT_STEPS if end is None else min(end, settled + MOST_EFFECT_STEPS)
        old = _steps(connection, run, max(before + WARMUP_STEPS, first - MOST_EFFECT_STEPS), first)
        new = _steps(connection, run, settled, last)
        forecast = None if old_policy is None else _expected(made, old_policy, change)
        if forecast is None and earlier is not None:
            # The database keeps only a run's newest forecasts, but the stored effect includes the
            # forecast that was made before the switch.
            forecast = earlier.forecast
        complete = newest >= last - 1
        effect = _effect(change, old, new, forecast, end is not None, complete)
        gone = earlier is not None and earlier.after_steps > effect.after_steps
        effects.append(earlier if earlier is not None and gone else effect)
    return effects


def note(store: Store, run: int, *, ended: bool) -> None:
    """Store the measured effects of a run's switches.

    A stored effect that is `complete` (no later step can change it) is not stored again. While the
    run is active (`ended` is false), effects are stored only if they are `known` or `complete`; see
    `SwitchEffect`.
    """
    with store.read() as connection:
        made = effects_of(connection, run)
        stored = kept_effects.of_run(connection, run)
        placement = attempts.placement(connection, run)
    names = [] if placement is None else placement.nodes
    where = (len(set(names)) or None, len(names) or None)
    with store.write() as connection:
        for effect in made:
            final = (stored.get(effect.version) or {}).get("complete", False)
            if not final and (effect.known or effect.complete or ended):
                kept_effects.keep(connection, run, asdict(effect), *where)


def _from_body(body: Mapping[str, Any]) -> SwitchEffect:
    forecast = body["forecast"]
    expected = None if forecast is None else ExpectedEffect(**forecast)
    return SwitchEffect(**{**body, "forecast": expected})


def of_run(connection: Connection, run_id: str) -> list[SwitchEffect]:
    """Return `effects_of` for the run's public id."""
    return effects_of(connection, runs.key_of(connection, run_id))


def _steps(connection: Connection, run: int, first: int, end: int) -> Floats:
    """Return rows (step, load, time) of steps in [first, end) that have a load and a time."""
    table = records.step_table(connection, run, ["step_s"], (first, end - 1))
    return np.asarray(table[(table[:, 1] > 0) & (table[:, 2] > 0)])


def _effect(
    change: Switch,
    old: Floats,
    new: Floats,
    forecast: ExpectedEffect | None,
    replaced: bool,
    complete: bool,
) -> SwitchEffect:
    assert change.effective_step is not None
    counts = (len(old), len(new))
    where = (change.version, change.policy, change.effective_step, *counts)
    end = (forecast, replaced, complete, False)
    if min(counts) < FEWEST_STEPS:
        return SwitchEffect(*where, False, None, None, None, *end)
    (before, before_error), (after, after_error) = _rate(old), _rate(new)
    ratio, error = after / before, math.hypot(before_error, after_error)
    low, high = (1 - ratio * math.exp(sign * _T_QUANTILE * error) for sign in (1, -1))
    return SwitchEffect(*where, low > 0 or high < 0, 1 - ratio, low, high, *end)


def _unscored(change: Switch, *, replaced: bool) -> SwitchEffect:
    assert change.effective_step is not None
    return SwitchEffect(
        version=change.version,
        policy=change.policy,
        first_step=change.effective_step,
        before_steps=0,
        after_steps=0,
        known=False,
        saving=None,
        low=None,
        high=None,
        forecast=None,
        replaced=replaced,
        complete=True,
        unchanged=True,
    )


def _same(first: Switch | PolicyInForce, second: Switch | PresetForecast) -> bool:
    return first.policy == second.policy and policies.same(
        first.policy, first.parameters, second.parameters
    )


def _rate(rows: Floats) -> tuple[float, float]:
    """Return the time per load and its relative standard error, from sums over blocks of steps."""
    load, time = rows[:, 1], rows[:, 2]
    rate = float(time.sum() / load.sum())
    off = time - rate * load
    blocks = np.add.reduceat(off, np.arange(0, len(off), _BLOCK_STEPS))
    count = len(blocks)
    variance = float((blocks**2).sum()) * count / max(count - 1, 1)
    return rate, math.sqrt(variance) / float(time.sum())


def _expected(made: Sequence[Forecast], before: Switch, change: Switch) -> ExpectedEffect | None:
    """Return the effect of the switch `change` according to the newest suitable forecast, or None.

    Savings in a forecast are relative to the policy in force, so only forecasts that were made
    under the policy `before` are suitable.
    """
    assert change.effective_step is not None
    for forecast in reversed(made):
        if forecast.step is None or forecast.step >= change.effective_step:
            continue
        if not _same(forecast.current, before):
            continue
        for preset in forecast.forecasts:
            if _same(change, preset):
                return ExpectedEffect(preset.saving, preset.saving_low, preset.saving_high)
        if forecast.compares:
            return None
    return None


def _change(saving: float) -> str:
    percent = f"{100 * abs(saving):.0f} %"
    return f"{percent} {'less' if saving >= 0 else 'more'} time"
