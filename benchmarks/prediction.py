"""How close plans come to those of an oracle that knows each rank's speed.

Eight ranks, half of them twice as slow. In each step the work is divided by the speeds that a
predictor expects after the steps so far. The oracle divides it by the true speeds; noise is known
to nobody. The figure is the time of all steps ÷ the oracle's. Beside the predictor: moving averages
of time per unit, and a Kalman filter of a local level with the variances that suit the pattern
best. With `--regressors` scikit-learn's regressors, too, which takes minutes. All is virtual time.
Chosen on seeds below 1,000, shown on others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from harness import Check, finish, parser

from paceline_backend.policies import pauses
from paceline_backend.policies.base import Feedback, Floats, Models
from paceline_backend.policies.predict.estimators import REGRESSORS, predictor_of

WORLD, STEPS, WARM = 8, 375, 32
UNITS = 800.0  # of work in a step
SEED = 41_000
AVERAGES = (0.1, 0.2, 0.4, 0.7)


@dataclass(frozen=True)
class Pattern:
    """How speeds change: (generator) → factor of each rank's time, [STEPS, WORLD]."""

    name: str
    factors: Callable[[np.random.Generator], Floats]
    noise: float
    bound: float  # of the time ÷ the oracle's; 0: printed only
    every: int = 1  # steps of a segment


def _sinus(rng: np.random.Generator) -> Floats:
    phase = np.arange(WORLD) / WORLD
    return 1 + 0.5 * np.sin(2 * np.pi * (np.arange(STEPS)[:, None] / 200 + phase))


def _walk(rng: np.random.Generator) -> Floats:
    return np.asarray(np.exp(np.cumsum(0.03 * rng.standard_normal((STEPS, WORLD)), axis=0)))


def _step(rng: np.random.Generator) -> Floats:
    made = np.ones((STEPS, WORLD))
    made[100:300, int(rng.integers(WORLD))] = 4.0
    return made


def _pauses(rng: np.random.Generator) -> Floats:
    made = np.ones((STEPS, WORLD))
    made[int(rng.integers(37)) :: 37, int(rng.integers(WORLD))] = 5.0
    return made


def _equal(rng: np.random.Generator) -> Floats:
    return np.ones((STEPS, WORLD))


PATTERNS = (
    Pattern("sinus of ±50 % over 200 steps", _sinus, 0.05, 1.04),
    Pattern("lognormal walk of 0.03 a step", _walk, 0.05, 1.035),
    Pattern("one rank 4x slower in steps 100-300", _step, 0.05, 1.025),
    Pattern("one rank 5x slower each 37th step", _pauses, 0.05, 1.08),
    Pattern("nothing changes", _equal, 0.05, 1.002),
    Pattern("sinus, 20 % noise", _sinus, 0.2, 1.06),
    Pattern("nothing changes, 20 % noise", _equal, 0.2, 1.01),
    Pattern("sinus, segments of 10 steps", _sinus, 0.05, 1.06, every=10),
    Pattern("walk, segments of 10 steps", _walk, 0.05, 0, every=10),
)

# Loads and times so far [S, W], and how many steps are next → s a unit, [W] or [next, W].
Forecaster = Callable[[Floats, Floats, int], Floats]


def of_predictor(regressor: str = "tracking") -> Forecaster:
    """The product's predictor, on the steps that controllers give it, with its regular pauses."""
    predictor = predictor_of(regressor, 64, cost="sum")
    memory: dict[str, Any] = {}

    def of(loads: Floats, times: Floats, following: int) -> Floats:
        nonlocal memory
        steps = len(times)
        first = max(steps - 64, 0)
        step, rank = np.divmod(np.arange(first * WORLD, steps * WORLD), WORLD)
        load = loads[first:].ravel()
        rows = np.maximum(np.round(load / 8), 1).astype(np.int64)
        feedback = Feedback(step, rank, rows, load, times[first:].ravel(), load * 8, load / rows)
        models: Models = predictor.fit(feedback, WORLD)
        memory = pauses.noticed(memory, feedback, models)
        slower = pauses.factors(memory, steps, following, WORLD)
        share = UNITS / WORLD
        rate = np.asarray((models.a * share + models.c * share / 8 + models.b) / share)
        return rate if slower is None else rate * slower

    return of


def average(gain: float) -> Forecaster:
    """A moving average of the time per unit."""

    def of(loads: Floats, times: Floats, following: int) -> Floats:
        rates = times / loads
        weights = gain * (1 - gain) ** np.arange(len(rates))[::-1]
        return np.asarray((weights[:, None] * rates).sum(axis=0) / weights.sum())

    return of


def over_oracle(pattern: Pattern, forecast: Forecaster, seed: int) -> float:
    """The time of all counted steps ÷ that of the oracle."""
    rng = np.random.default_rng(seed)
    unit_s = np.where(np.arange(WORLD) % 2, 2.0, 1.0) / 100
    factors = pattern.factors(rng) * unit_s
    noise = np.maximum(1 + pattern.noise * rng.standard_normal((STEPS, WORLD)), 0.1)
    loads, times = np.empty((STEPS, WORLD)), np.empty((STEPS, WORLD))
    best = np.empty(STEPS)
    rates = np.ones((pattern.every, WORLD))
    for step in range(STEPS):
        if step and step % pattern.every == 0:
            expected = forecast(loads[:step], times[:step], pattern.every)
            rates = np.broadcast_to(expected, (pattern.every, WORLD))
        rate = rates[step % pattern.every]
        loads[step] = UNITS / rate / (1 / rate).sum()
        times[step] = loads[step] * factors[step] * noise[step]
        share = UNITS / factors[step] / (1 / factors[step]).sum()
        best[step] = (share * factors[step] * noise[step]).max()
    return float(times[WARM:].max(axis=1).sum() / best[WARM:].sum())


def measured(pattern: Pattern, seeds: Sequence[int], regressors: Sequence[str]) -> dict[str, float]:
    """Mean over seeds, of the predictor, of regressors and of the moving averages."""
    contenders: dict[str, Callable[[], Forecaster]] = {"predictor": of_predictor}
    contenders |= {name: partial(of_predictor, name) for name in regressors}
    contenders |= {f"average {gain}": partial(average, gain) for gain in AVERAGES}
    return {
        name: float(np.mean([over_oracle(pattern, make(), seed) for seed in seeds]))
        for name, make in contenders.items()
    }


def main() -> None:
    """Runs the benchmark."""
    asking = parser(__doc__)
    asking.add_argument("--seeds", type=int, default=20, help="how many; %(default)s")
    asking.add_argument("--seed", type=int, default=SEED, help="the first; %(default)s")
    asking.add_argument("--regressors", action="store_true", help="scikit-learn's, too")
    options = asking.parse_args()
    regressors = [*REGRESSORS, "cross-validated"] if options.regressors else []
    seeds = range(options.seed, options.seed + (3 if options.quick else options.seeds))
    results = {pattern.name: measured(pattern, seeds, regressors) for pattern in PATTERNS}
    checks = [
        Check(f"time over the oracle's, {pattern.name}", value, pattern.bound, "<=")
        for pattern in PATTERNS
        if pattern.bound and (value := results[pattern.name]["predictor"])
    ]
    lines = [
        f"{name:40}" + "".join(f"{who} {value:.4f}  " for who, value in row.items())
        for name, row in results.items()
    ]
    finish(options, {"seed": options.seed, "seeds": len(seeds)}, results, checks, "\n".join(lines))


if __name__ == "__main__":
    main()
