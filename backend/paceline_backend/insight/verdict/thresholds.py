"""Thresholds of verdicts, on which the causes, their ranks and their steps depend.

The values that docs/verdicts.md states are promises to users. The other values were chosen on runs
like the runs of ``benchmarks/verdicts.py`` (benchmarks/scenarios/verdicts.json): run this benchmark
after a change. The comment on a threshold quotes the kind of run, in the scenarios file, on which
the threshold was chosen. Scenarios with switches of the policy are in
benchmarks/scenarios/switches.yaml; tests/integration/insight/test_switched_scenarios.py runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class VerdictThresholds:
    """Thresholds, in the order in which a verdict uses them."""

    # --- Input (`observed`). Most thresholds of this section limit the time of a verdict, which
    # benchmarks/scale.py measures.

    # Number of the newest steps that a verdict covers if the caller gives no range.
    range_steps: int = 500  # steps
    # Maximum of steps² × ranks in the input of a verdict; a verdict of this size takes a second or
    # two. If a range is larger, only its newest steps are used, because the time of the search for
    # levels grows with the square of the number of steps.
    most_pairs: float = 5e7  # steps² × ranks
    # Maximum number of rows that are read, those of the newest steps.
    most_rows: int = 100_000  # rows
    # The steps of a policy with fewer than this many steps count for the policy before it.
    # docs/verdicts.md states this value, and the tests of switches.yaml check it.
    policy_steps: int = 16  # steps

    # --- Levels, spans and periods of a series (`courses`).

    # A level that lasts this long is no longer temporary. docs/verdicts.md states this value.
    # Chosen on runs of the kind "slowness that has just begun".
    lasting_steps: int = 20  # steps
    # A lasting slowness is ignored if the logarithm of its factor is below this. docs/verdicts.md
    # states the 5 %. Chosen on runs of the kind "one rank three percent slower for good".
    least_log: float = float(np.log(1.05))
    # A span of fewer than `short_steps` steps is ignored if the logarithm of its factor is below
    # this. Chosen on runs of the kind "pauses too short to matter".
    least_log_short: float = float(np.log(1.1))
    short_steps: int = 5  # steps
    # A span may be interrupted by up to this many steps at the usual level. Chosen on runs of the
    # kind "flapping link".
    gap_steps: int = 2  # steps
    # `courses.levels` adds this number ÷ the number of steps to the price of a cut, so that short
    # series are cut less often. Chosen on runs of the kind "few steps".
    unsure: float = 200.0  # σ² · steps
    # The steps at one phase of a period are pauses if their mean is at least this many standard
    # errors (of this mean) above the level. Chosen on runs of the kinds "garbage collection of one
    # rank among hundreds" (found) and "hundreds of ranks" (nothing found).
    folded_sigmas: float = 6.0  # σ
    # The search for periods clips each step's deviation to this value, so that one large pause does
    # not look like a period. Chosen on runs of the kind "rare long pauses of a rank".
    clipped_sigmas: float = 3.5  # σ
    # Each occurrence of a period may be up to `jitter_steps` early or late, and at least the
    # fraction `expected_share` of the expected occurrences must be found. Chosen on runs of the
    # kind "cron job on a node".
    jitter_steps: int = 2  # steps
    expected_share: float = 0.7
    # A trend has at least `trend_steps` steps and replaces at least `trend_levels` ascending
    # levels. Chosen on runs of the kinds "thermal throttling that grows" (a trend) and "throttling
    # in stairs" (no trend).
    trend_steps: int = 15  # steps
    trend_levels: int = 3  # levels

    # --- Slow ranks (`slowness`).

    # Lower bound of the noise of computing times.
    compute_noise: float = 0.004  # relative
    # A rank's lowest level must cover this fraction of the steps to be its usual level. Chosen on
    # runs of the kind "slow at the beginning, then recovered".
    usual_share: float = 0.25
    # Slowness counts as lasting only if the rank's median time since the slowness began is more
    # than this many standard errors above the rank's usual time. docs/verdicts.md states this
    # value. Chosen on runs of the kind "few steps".
    sure_errors: float = 5.0  # standard errors
    # A span with fewer than this many steps is a pause, which takes equally long at any speed of
    # the rank. Chosen on runs of the kind "two: slow rank, and a noisy neighbour on another that is
    # worse".
    pause_steps: int = 5  # steps
    # For periodic pauses that are too small to detect individually: at least this fraction of the
    # expected pauses must be observed, and at least the same fraction of the rank's spans of
    # temporary slowness must be such pauses. Chosen on runs of the kind "garbage collection of a
    # rank at a strict period".
    period_share: float = 0.7
    # Lastingly slow ranks form a group if their slowness starts at most `together_steps` apart.
    # Other slow ranks form a group if they share the fraction `together_share` of their slow steps.
    # Chosen on runs of the kinds "slow node since a step" and "two: one rank slow since a step,
    # another slower since a later one".
    together_steps: int = 5  # steps
    together_share: float = 0.5
    # A plan reacts to slowness if the usual cost of the slow rank's batches is at most
    # `smaller_part` × the usual cost of the other ranks' batches. The slowness counts as
    # compensated if smaller batches offset at least the fraction `offset_share` of it. Chosen on
    # runs of the kind "plan makes up for slow ranks half-way".
    smaller_part: float = 1 / 1.05
    offset_share: float = 0.3

    # --- Uneven batches (`slowness.data_of`).

    # A rank is named only if the mean cost of its batches exceeds the typical rank's mean cost by
    # more than `larger` and by more than `larger_errors` standard errors. Chosen on runs of the
    # kinds "shard of one rank has longer samples" (named) and "long-tailed sizes" (not named).
    larger: float = 0.06  # relative
    larger_errors: float = 6.0  # standard errors
    # The fraction of the computing time for which ranks wait because of uneven batches is computed
    # for each policy. A policy's batches are uneven if its fraction is at least `uneven_share`, or
    # at least `uneven_of_worst` × the largest fraction of all policies. The tests of switches.yaml
    # check both values.
    uneven_share: float = 0.02
    uneven_of_worst: float = 0.5

    # --- Waits (`waits`).

    # `wait_noise` is the lower bound of the noise of waits. A wait that exceeds its usual length by
    # less than `least_wait` is ignored.
    wait_noise: float = 0.002  # relative to a step's time
    least_wait: float = 0.01  # relative to a step's time
    # A wait that is equally long in all steps is a finding only if it takes at least this share of
    # the wall time. docs/verdicts.md states this value. Chosen on runs of the kinds "long reduction
    # in all steps" (a finding) and "short reduction" (no finding).
    always_share: float = 0.25
    # A wait of all ranks for their data loaders that is equally long in all steps is a finding only
    # if it takes at least this share of the wall time. docs/verdicts.md states this value. Chosen
    # on runs of the kinds "loaders of all ranks too slow in all steps" (a finding) and "constant
    # small loader time" (no finding).
    always_input_share: float = 0.05
    # Ranks wait for loaders together if they share the fraction `wait_share` of their waiting
    # steps, or `lasting_wait_share` if one of them waits until the last step. Chosen on runs of the
    # kind "NFS hiccup of one node's loaders".
    wait_share: float = 0.4
    lasting_wait_share: float = 0.7
    # A group that contains at least this fraction of the ranks counts as all ranks.
    # docs/verdicts.md states this value. Chosen on runs of the kind "storage hangs for all ranks in
    # some steps".
    everyone: float = 0.9
    # Ranks that wait for loaders in the same steps form a group. If there are more groups than this
    # fraction of the number of ranks, the ranks wait "in turn": most groups become one finding that
    # names no rank. Chosen on runs of the kind "loaders of the ranks hang in turn".
    in_turn: float = 0.35
    # Time is attributed to planning under three conditions. First, all ranks wait in the first step
    # of at least `fewest_plans` segments. Second, of the steps in which all ranks wait, at least
    # the fraction `plans_share` are first steps of segments. Third, since the first of these waits,
    # all ranks wait in at least the fraction `plans_share` of the first steps of segments. Of a
    # rank's wait, at most `longest_plan` times the shortest wait of the step is attributed to
    # planning. Chosen on runs of the kind "planning that is slow".
    fewest_plans: int = 3  # segments
    plans_share: float = 0.75
    longest_plan: float = 1.5  # × the shortest wait of a rank

    # --- What counts (`judge`, `findings`).

    # Minimum number of steps for a verdict. docs/verdicts.md states this value.
    fewest_steps: int = 4  # steps
    # A cause is named only if it would cost at least this share of the wall time as the only cause.
    # docs/verdicts.md promises that no cause below 0.5 % and every cause above 2 % is named, so the
    # value lies between them. Chosen on runs of the kind "checkpoints that cost next to nothing".
    least_share: float = 0.0125
    # Findings that cost less than this fraction of `least_share` are left out all at once, which
    # saves time.
    far: float = 0.2
    # If no cause is named, but ranks spend more than this share of their time waiting for each
    # other, the text of the verdict is "No cause stands out" instead of "No straggler".
    # docs/verdicts.md states this value.
    waiting_share: float = 0.05
    # Minimum number of steps for a verdict about a node, because the first steps of ranks are
    # uneven. tests/integration/insight/test_slow_nodes.py checks this value.
    node_steps: int = 20  # steps

    # --- The diagnosis (`diagnosis`). docs/verdicts.md states these values;
    # tests/unit/insight/test_diagnosis.py checks them. If at least `watch_share` of the time is
    # lost, a run's level is "warning"; from `held_up_share` on, it is "slowed down" if a cause is
    # active.
    watch_share: float = 0.06
    held_up_share: float = 0.2
    # The mean step time, and a diagnosis without an active cause, cover this many of the newest
    # steps.
    shown_steps: int = 50  # steps
    # A cause that occurred at least this often may occur again, so it counts as active.
    recurring: int = 3  # occurrences


THRESHOLDS = VerdictThresholds()
