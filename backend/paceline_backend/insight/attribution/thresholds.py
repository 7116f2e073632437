"""Thresholds of the attribution and of the model of step times, which verdicts use, too.

The values were chosen on simulated runs whose causes are known. ``benchmarks/verdicts.py`` checks
the thresholds of the model, because each verdict begins with the model's fit. Its runs have kinds;
a comment quotes the kind for which the threshold was chosen. No measurement has shown yet for which
kinds the verdicts change if a threshold is halved. The thresholds of the split are checked by
tests/unit/insight/test_attribution.py, because no benchmark uses the split.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttributionThresholds:
    """Thresholds by analysis, in the order in which an attribution is computed."""

    # --- Input (`attribute.read_rows`). They limit the time of an attribution, which
    # benchmarks/scale.py measures.

    # Number of the newest steps that an attribution covers if the caller gives no range.
    range_steps: int = 100  # steps
    # Maximum number of rows that are read. Of a longer range, only the newest steps are read.
    most_rows: int = 200_000  # rows

    # --- Fit (`model`).

    # Minimum number of a rank's rows to distinguish lasting from temporary slowness; "few steps".
    fewest_rows: int = 4  # rows
    # A rank is not slow if its usual time ÷ the cost of its batches is within this factor. This is
    # the 5 % of docs/verdicts.md; "some ranks get more samples throughout".
    near: float = 1.05
    # A sum is clearly smaller than another if it is below this fraction of the other sum; "plan
    # makes up for slow ranks half-way".
    clearly: float = 0.8
    # Shape and speeds are fitted in turn this many times; more iterations change nothing.
    rounds: int = 5
    # Like the linear predictor, the fit has a prior that cost is proportional to load; "uneven
    # sizes that cost nothing".
    prior: float = 0.12
    # Prior standard deviation of a rank's slope: its load-dependent cost relative to its whole
    # cost.
    slope: float = 0.5
    # Bounds of the noise of a step. A machine's usual noise is 1 % to 5 %; larger variation counts
    # as slowness. "noise of nearly ten percent".
    least_noise: float = 0.005  # relative
    most_noise: float = 0.06  # relative
    # A single step this far off is an outlier (by chance: once in 150,000).
    single_sigmas: float = 4.5  # σ
    # `several_steps` whose median is this far off are outliers (by chance: nearly as rare).
    several_sigmas: float = 2.5  # σ
    several_steps: int = 5  # steps
    # An outlier is also off by at least this factor.
    outlier: float = 1.1
    # Speeds that differ by less count as equal; "machines that differ by less than two percent".
    alike: float = 0.02  # relative

    # --- Split (`attribute`).

    # Maximum number of steps for which a plan can react to a past slowdown, because it uses the
    # feedback of these steps. This is the longest window of a predictor (`WindowSteps`).
    lag_steps: int = 64  # steps
    # Reactions of a plan that are smaller than this fraction of a step's time are ignored.
    least_reaction: float = 0.02
    # A slow span does not end at a gap of at most this many steps at the usual speed.
    gap_steps: int = 3  # steps
    # Maximum number of slow spans that are reported for each rank; these are the newest spans.
    most_spans: int = 50  # spans
    # Smaller differences of times are due to rounding in another order of computation.
    same: float = 1e-9  # relative


THRESHOLDS = AttributionThresholds()
