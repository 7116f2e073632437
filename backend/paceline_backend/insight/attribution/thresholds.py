"""Thresholds of the attribution, and of the model of step times, which verdicts use, too.

``benchmarks/verdicts.py`` checks the thresholds of the model, because each verdict begins with the
model's fit. The benchmark simulates runs of several kinds; the comment on a threshold quotes the
kind on which the threshold was chosen. tests/unit/insight/test_attribution.py checks the thresholds
of the split, because no benchmark uses the split.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttributionThresholds:
    """Thresholds, in the order in which an attribution uses them."""

    # --- Input (`attribute.read_rows`). The thresholds of this section limit the time of an
    # attribution, which benchmarks/scale.py measures.

    # Number of the newest steps that an attribution covers if the caller gives no range.
    range_steps: int = 100  # steps
    # Maximum number of rows that are read, those of the newest steps.
    most_rows: int = 200_000  # rows

    # --- Fit (`model`).

    # A rank's speed is fitted only if the rank has at least this many rows; fewer rows cannot show
    # whether slowness lasts. Chosen on runs of the kind "few steps".
    fewest_rows: int = 4  # rows
    # In a run whose script divides its batches, all ranks count as equally fast if each rank's
    # median of measured ÷ modelled time is within this factor of 1. docs/verdicts.md states the
    # 5 %. Chosen on runs of the kind "some ranks get more samples throughout".
    near: float = 1.05
    # The second of two fits is used if its sum of deviations is below this fraction of the first
    # fit's sum. Chosen on runs of the kind "plan makes up for slow ranks half-way".
    clearly: float = 0.8
    # Number of iterations of the fit; more iterations do not change the result.
    rounds: int = 5
    # Strength of the prior that cost is proportional to load; the linear predictor has a similar
    # prior. Chosen on runs of the kind "uneven sizes that cost nothing".
    prior: float = 0.12
    # Prior standard deviation of a rank's slope, which is 1 if the rank's time depends on load like
    # the typical rank's time.
    slope: float = 0.5
    # Lower and upper bound of the noise of a step's time. A machine's usual noise is 1 % to 5 %;
    # larger variation counts as slowness. Chosen on runs of the kind "noise of nearly ten percent".
    least_noise: float = 0.005  # relative
    most_noise: float = 0.06  # relative
    # A step is an outlier if its time deviates by more than this, which happens by chance only once
    # in 150,000 steps.
    single_sigmas: float = 4.5  # σ
    # `several_steps` consecutive steps are outliers if their median deviates by more than
    # `several_sigmas`, which happens by chance about as rarely as a single outlier.
    several_sigmas: float = 2.5  # σ
    several_steps: int = 5  # steps
    # A step whose time differs from the model by less than this factor is never an outlier.
    outlier: float = 1.1
    # Speeds that differ by less than this count as equal. Chosen on runs of the kind "machines that
    # differ by less than two percent".
    alike: float = 0.02  # relative

    # --- Split (`attribute`).

    # Maximum number of steps after a slowdown in which plans can still react to it, because they
    # use feedback from this many past steps. This is the longest window of a predictor
    # (`WindowSteps`).
    lag_steps: int = 64  # steps
    # A plan's reaction to slowness is ignored if it changes a rank's time by less than this
    # fraction of the time of the mean batch.
    least_reaction: float = 0.02
    # Two slow steps belong to the same span if they are at most this many steps apart.
    gap_steps: int = 3  # steps
    # For each rank at most this many slow spans are reported, the newest ones.
    most_spans: int = 50  # spans
    # Two times with a smaller relative difference count as equal, because rounding can cause such a
    # difference.
    same: float = 1e-9  # relative


THRESHOLDS = AttributionThresholds()
