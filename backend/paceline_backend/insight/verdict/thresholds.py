"""Thresholds of verdicts, on which the causes, their ranks and their steps depend.

All modules of this package read their thresholds from `THRESHOLDS`; numbers inside a formula, such
as the price of a cut, stay with the formula. Shares of the wall time, counts of steps and the 5 %
of a lasting slowness are promises of docs/verdicts.md. The other values were chosen on runs like
the runs of ``benchmarks/verdicts.py`` (benchmarks/scenarios/verdicts.json): run this benchmark
after a change. It fails if causes, ranks, first steps or costs are named wrongly too often, or if
too many runs without a cause get one. A comment quotes the kind of run for which the threshold was
chosen. No measurement has shown yet for which kinds the verdicts change if a threshold is halved.
Scenarios with switches of the policy are in benchmarks/scenarios/switches.yaml
(tests/integration/insight/test_switched_scenarios.py).

Constants that only affect sentences are in `words`, because they change no finding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VerdictThresholds:
    """Thresholds by analysis, in the order in which a verdict is computed."""

    # --- Input (`observed`). Most of these limit the time of a verdict, which benchmarks/scale.py
    # measures.

    # Number of the newest steps that a verdict covers if the caller gives no range.
    range_steps: int = 500  # steps
    # Maximum size of a verdict, which takes a second or two. Of a larger range, fewer steps are
    # used, because the search for levels is quadratic in the steps.
    most_pairs: float = 5e7  # pairs of steps × ranks
    # Maximum number of rows that are read. Of a longer range, only the newest steps are read.
    most_rows: int = 100_000  # rows
    # A policy with fewer steps is not judged separately. Promised; fixed by switches.yaml.
    policy_steps: int = 16  # steps

    # --- Levels, spans and periods of a series (`courses`).

    # A level that lasts this long is no longer temporary. Promised; "slowness that has just begun".
    lasting_steps: int = 20  # steps
    # A lasting difference below this logarithm is ignored. Promised; "one rank three percent slower
    # for good".
    least_log: float = float(np.log(1.05))
    # Spans of fewer than `short_steps` steps must differ by this logarithm; "pauses too short to
    # matter".
    least_log_short: float = float(np.log(1.1))
    short_steps: int = 5  # steps
    # A gap of up to this length at the usual level does not end a span; "flapping link".
    gap_steps: int = 2  # steps
    # Divided by the number of steps, this is added to the price of a cut; "few steps".
    unsure: float = 200.0  # σ² · steps
    # The mean of a phase of a period is an outlier if it is this far off; "garbage collection of
    # one rank among hundreds" against "hundreds of ranks".
    folded_sigmas: float = 6.0  # σ
    # The search for periods clips each step's deviation to this, because one large pause is not a
    # period; "rare long pauses of a rank".
    clipped_sigmas: float = 3.5  # σ
    # Each occurrence of a period may be this much early or late, and this fraction of the expected
    # occurrences must be found; "cron job on a node".
    jitter_steps: int = 2  # steps
    expected_share: float = 0.7
    # Minimum numbers of steps and of ascending levels of a trend; "thermal throttling that grows"
    # against "throttling in stairs".
    trend_steps: int = 15  # steps
    trend_levels: int = 3  # levels

    # --- Slow ranks (`slowness`).

    # Lower bound of the noise of computing times.
    compute_noise: float = 0.004  # relative
    # A rank's lowest level must cover this fraction of the steps to be its usual level; "slow at
    # the beginning, then recovered".
    usual_share: float = 0.25
    # A lasting slowness must be at least this far above the usual time. Promised; "few steps".
    sure_errors: float = 5.0  # standard errors
    # A shorter span is a pause, which takes equally long at any speed of the rank; "two: slow rank,
    # and a noisy neighbour on another that is worse".
    pause_steps: int = 5  # steps
    # Of the occurrences of a weak period this fraction must be observed, and the same fraction of
    # the spans must belong to the period; "garbage collection of a rank at a strict period".
    period_share: float = 0.7
    # Ranks are slow together if their first steps differ by at most this much, or if they share
    # this fraction of their slow steps; "slow node since a step", "two: one rank slow since a step,
    # another slower since a later one".
    together_steps: int = 5  # steps
    together_share: float = 0.5
    # A plan reacts to slowness if it makes a rank's batches smaller than this; and the slowness
    # counts as compensated if smaller batches offset this fraction of it. "plan makes up for slow
    # ranks half-way".
    smaller_part: float = 1 / 1.05  # × the usual batch
    offset_share: float = 0.3

    # --- Uneven batches (`slowness.data_of`).

    # A rank is named only if its batches are larger by this much throughout, and by this many
    # standard errors; "shard of one rank has longer samples" against "long-tailed sizes".
    larger: float = 0.06  # relative
    larger_errors: float = 6.0  # standard errors
    # A policy's batches are uneven if this share of its computing time is lost, or this fraction of
    # the loss under the worst policy; fixed by switches.yaml.
    uneven_share: float = 0.02
    uneven_of_worst: float = 0.5

    # --- Waits (`waits`).

    # Lower bound of the noise of waits, and the excess up to which a wait counts as usual.
    wait_noise: float = 0.002  # relative to a step's time
    least_wait: float = 0.01  # relative to a step's time
    # A wait that is the same in all steps counts from this share of the wall time on. Promised;
    # "long reduction in all steps" against "short reduction".
    always_share: float = 0.25
    # The same share for data loaders for which all ranks wait; it is lower. Promised; "loaders of
    # all ranks too slow in all steps" against "constant small loader time".
    always_input_share: float = 0.05
    # Ranks wait for loaders together if they share this fraction of their waiting steps, or this
    # fraction if one of them waits permanently; "NFS hiccup of one node's loaders".
    wait_share: float = 0.4
    lasting_wait_share: float = 0.7
    # From this fraction on, a group of ranks counts as all ranks. Promised; "storage hangs for all
    # ranks in some steps".
    everyone: float = 0.9
    # If more than this fraction of the ranks wait at different times, they wait "in turn"; "loaders
    # of the ranks hang in turn".
    in_turn: float = 0.35
    # Planning: ranks must wait in the first step of at least this many segments. This fraction of
    # the steps in which all ranks wait must be first steps, and in this fraction of the first
    # steps, ranks must wait. A wait longer than this multiple of the shortest is not attributed to
    # planning. "planning that is slow".
    fewest_plans: int = 3  # segments
    plans_share: float = 0.75
    longest_plan: float = 1.5  # × the shortest wait of a rank

    # --- What counts (`judge`, `findings`).

    # Minimum number of steps for a verdict. Promised.
    fewest_steps: int = 4  # steps
    # A cause must cost at least this share of the wall time alone. The value lies between 0.5 %,
    # below which no cause should be named, and 2 %, above which every cause should be: both are
    # promised. "checkpoints that cost next to nothing".
    least_share: float = 0.0125
    # Findings below this fraction of the required cost are removed all at once, which saves time.
    far: float = 0.2
    # From this share of their time on, ranks are reported as waiting for each other. Promised.
    waiting_share: float = 0.05
    # Minimum number of steps for a verdict about a node, because the first steps of ranks are
    # uneven. Fixed by tests/integration/insight/test_slow_nodes.py.
    node_steps: int = 20  # steps

    # --- The diagnosis (`diagnosis`). Promised; fixed by tests/unit/insight/test_standing.py.

    # Shares of lost time from which on a run's level is "warning" and "slowed down".
    watch_share: float = 0.06
    held_up_share: float = 0.2
    # Number of the newest steps that a diagnosis without an active cause, and the mean step time,
    # cover.
    shown_steps: int = 50  # steps
    # A cause that occurred this often may occur again, so it counts as active.
    recurring: int = 3  # occurrences


THRESHOLDS = VerdictThresholds()
