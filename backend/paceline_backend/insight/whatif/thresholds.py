"""Thresholds of forecasts, and of the decisions of `auto`.

``benchmarks/forecasts.py`` checks the thresholds of forecasts: it compares forecasts with the step
times that presets have after a switch, and counts the step times that are inside the 95 %
intervals. The comment on a threshold quotes the kind of simulated run on which the threshold was
chosen. ``benchmarks/regret.py`` checks the thresholds of `auto`. docs/decisions/0020 and 0033
explain the choices.

The number of steps of a forecast and the minimum saving (`answer.FORECAST_STEPS`,
`FEWEST_FORECAST_STEPS`, `MARGIN`), and the steps at which `auto` makes forecasts
(`auto.AUTO_STEPS`, `FIRST_STEP`), are also used by the API and the control plane, so they are
defined in those modules.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ForecastThresholds:
    """Thresholds, in the order in which a forecast uses them."""

    # --- Input (`state`, `measured`). The first three thresholds limit time and memory.

    # Maximum numbers of records that are read for a forecast, and for warnings before a switch.
    most_cells: int = 200_000  # steps × ranks
    caution_cells: int = 50_000  # steps × ranks
    # The time of a reduction round is the median over this many of the newest rounds.
    newest_rounds: int = 256  # rounds
    # The first steps of an attempt are left out, because they include one-time work.
    cold_steps: int = 3  # steps
    # Minimum number of steady steps to measure the time of the policy in force.
    steady_steps: int = 16  # steps
    # Assumption: in at least this fraction of its steps, a rank waits for no other rank.
    # Chosen on runs of the kind "RNA in force while each rank's step is delayed by a random time".
    undisturbed: float = 0.1
    # Speed of the slowest network that is expected: 1 Gbit/s; checked by
    # tests/unit/insight/test_exchanges.py.
    slow_network: float = 1.25e8  # bytes per second

    # --- Steps in which ranks had their present speeds (`forecast.same_speeds`).

    # A rank's speed is the median over a block of this many steps. Chosen on runs of the kind "A
    # rank became slower shortly before the forecast and stays so".
    block_steps: int = 8  # steps
    # A rank's speed counts as changed if it differs from the present speed by more than this, and
    # by more than chance explains. Chosen on runs of the kind "A rank was slow for a while, which
    # was over shortly before the forecast".
    changed_speed: float = 0.15  # relative
    # Maximum probability that chance alone makes a rank's speed look changed.
    by_chance: float = 0.001

    # --- Costs of a batch (`shapes`).

    # The costs per sample and per step are fractions of a step's time; the rest is a cost per unit
    # of load. This is the prior standard deviation of each fraction. Chosen on runs of the kind
    # "Samples cost a fixed amount each, such as decoding, beside what their length costs".
    shape_prior: float = 0.25
    # Maximum number of ranks to which the shape is fitted; the limit saves time.
    shape_ranks: int = 64  # ranks
    # Lower bound of the noise of a step's time.
    least_noise: float = 0.003  # relative
    # The fit clips residuals to this many σ. Chosen on runs of the kind "Noisy neighbours: on a few
    # ranks other jobs come and go by chance, for some steps each".
    clipped_sigmas: float = 4.0  # σ
    # The shape is one formula for the computing times of all ranks, with a speed for each rank. If
    # its errors are more than this many times the errors of the models that were fitted rank by
    # rank, these models are used instead. Chosen on runs of the kind "Devices that differ in each
    # cost of their own, in no groups".
    worse_shape: float = 1.1

    # --- Simulations (`simulate`, `resampled`).

    # Maximum numbers of steps and of samples that count in each simulation; the limits save time.
    simulated_steps: int = 100  # steps
    simulated_samples: int = 400_000  # samples
    # Number of counted steps in simulations with models other than the fitted ones, and minimum
    # number of counted steps in every simulation.
    early_steps: int = 24  # steps
    # Number of bootstrap draws for the interval. Draws consist of blocks of steps, because
    # slowdowns last for several steps.
    draws: int = 64
    draw_block_steps: int = 8  # steps
    # A variant is kept if it saves more than this fraction of the time of its preset's defaults.
    better_variant: float = 0.01

    # --- Intervals and sentences (`forecast`).

    # Weights of the four contributions to an interval: the spread of bootstrap draws, the spread of
    # simulations with other models, the models' error, and unmeasured effects. With these values,
    # 95 % of the measured step times were inside the interval, on simulated runs of 20 kinds.
    interval_weights: tuple[float, float, float, float] = (1.5, 2.0, 1.5, 0.005)
    # The sentence about a slow node mentions the all-reduce if it takes more than this fraction of
    # a step.
    mentioned_share: float = 0.1

    # --- Decisions (`auto`).

    # `auto` does not switch within this many steps after any switch, except to go back.
    hold_steps: int = 100  # steps
    # If a rank's speed has changed by more than this, `auto` ignores earlier forecasts, and may
    # return to a policy that it left.
    changed_conditions: float = 0.25  # relative


THRESHOLDS = ForecastThresholds()
