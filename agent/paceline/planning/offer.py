"""The plan of the next segment, made from the history and feedback of a run.

The controller and the simulator call `offer` before each segment. `offer` sets the segment's number
of steps, requests its plan from the policy, and adds what the policy does not know. The leader may
adopt the segment; `offer` itself changes neither the database nor the bus.
"""

from __future__ import annotations

import math
import time

import msgspec
import numpy as np

from paceline import policies
from paceline.core.pool import is_pooled
from paceline.planning.feedback import Window, single_batches
from paceline.planning.history import History
from paceline.policies import Choice, Feedback, Policy, Shuffle
from paceline.policies.base import Floats, usable
from paceline.policies.streams import plan_stream
from paceline.wire import ALLREDUCE, Plan

# docs/internals.md has these values in its table "How many steps a segment has".
#
# Target duration of a segment.
SEGMENT_S = 1.0  # seconds
# Maximum number of steps of a segment, unless its steps are short or its synchronisation is
# relaxed. A policy switch takes effect only at a segment's end.
MOST_SEGMENT_STEPS = 4
# If `MOST_SEGMENT_STEPS` steps take less time than this, a segment may have more steps.
SHORTEST_SEGMENT_S = 0.25  # seconds
# A segment lasts at least this many times as long as planning takes.
PLANNING = 3.0
# Maximum number of steps of any segment.
FASTEST_STEPS = 64
# Under relaxed synchronisation: the target duration of a segment in seconds, and its minimum number
# of steps.
RELAXED_S, LEAST_RELAXED = 4.0, 16
# If ranks share batches, a segment is long enough for the slowest rank to train this many batches.
# At each segment's end, the other ranks may wait for one batch of the slowest rank.
OWN_BATCHES = 6
# Number of steps of a segment while the duration of a step is unknown.
FIRST_STEPS = 2
# While fewer steps than this are complete, segments are short, because each new plan is based on
# much more feedback than the plan before.
YOUNG_STEPS = 12
# A rank may have changed its speed if the logarithm of its measured ÷ its expected compute time
# (ETT) has a larger absolute value than this.
SURPRISE = math.log(1.25)
# If more than this many of the newest segments took another time than expected, the cause is taken
# to be a bad model, not a change of a rank's speed.
NOTICED = 3


def offer(
    history: History, window: Window, policy: Policy, version: int, plan_s: float = 0.0
) -> tuple[Plan, Shuffle | None]:
    """Plan the next segment with a policy; `version` is the run's policy version.

    The second returned value is the argument of `History.shuffled`; None: the run has a stream,
    which is not shuffled. `plan_s` is the expected duration of planning the segment after this one,
    in seconds; 0 in a simulation, where planning takes no time.

    Raises:
        ValueError: the policy cannot keep the run's token budget.
    """
    # Check this before making a `Problem`. Making one takes time in proportion to the number of
    # samples, which an unsuited policy would waste at each report of the ranks.
    if reason := policies.unsuited(policy, history.hello.token_budget):
        raise ValueError(reason)
    started = time.perf_counter()
    feedback = single_batches(window.feedback(), history.newest)
    history.recall(window.ranges())
    hello = history.hello
    choice = policy.choose(
        feedback,
        hello.world,
        history.memory(version),
        history.nodes,
        first_step=history.step,
        uneven_steps=hello.uneven_steps,
    )
    relaxed = choice.synchroniser != ALLREDUCE
    shared = hello.uneven_steps and hello.world > 1 and is_pooled(choice.synchroniser)
    steps = segment_steps(
        window.step_s(history.newest),
        hasty=len(feedback) < YOUNG_STEPS * hello.world or _has_changed_speed(history, feedback),
        plan_s=plan_s,
        relaxed=relaxed,
        slowest=slowest_steps(feedback, hello.world) if shared else 0.0,
    )
    if hello.stream:
        problem = history.problem(steps, version, shuffle=False)
        made, shuffle = plan_stream(policy, problem, feedback), None
    else:
        made, shuffle = _plan(history, policy, version, feedback, steps, choice)
    completed = msgspec.structs.replace(
        made,
        feedback=window.ranges(),
        plan_s=time.perf_counter() - started,
        pooled=shared,
        homes=history.shares_data(policy),
        anew=history.anew,
    )
    return completed.keeping(made.assignment), shuffle


def _plan(
    history: History,
    policy: Policy,
    version: int,
    feedback: Feedback,
    steps: int,
    choice: Choice,
) -> tuple[Plan, Shuffle]:
    ahead = history.ahead(steps, version, policy)

    def planned(*, shuffle: bool) -> tuple[Plan, Shuffle]:
        problem = history.problem(steps, version, shuffle=shuffle)
        return policies.plan(policy, problem, feedback, shuffle=shuffle, choice=choice, ahead=ahead)

    made, shuffle = planned(shuffle=history.must_shuffle(version))
    if policy.recomposes and not made.shuffled and history.outdated(made, shuffle.cost):
        return planned(shuffle=True)
    return made, shuffle


def segment_steps(
    step_s: float | None,
    *,
    hasty: bool = False,
    plan_s: float = 0.0,
    relaxed: bool = False,
    slowest: float = 0.0,
) -> int:
    """Return the number of steps that a segment should have.

    Args:
        step_s: duration of a step in seconds; None: not known yet.
        hasty: the newest step took another time than expected, or few steps are complete. The
            segment is then as short as the time to plan permits.
        plan_s: duration of planning in seconds.
        relaxed: the synchronisation is relaxed, so that all ranks synchronise only at the segment's
            end. In a longer segment they drift apart more.
        slowest: result of `slowest_steps` where ranks share batches.
    """
    if step_s is None:
        return FIRST_STEPS
    step_s = max(step_s, 1e-6)
    if relaxed:
        wanted = max(round(RELAXED_S / step_s), math.ceil(OWN_BATCHES * slowest))
        return max(LEAST_RELAXED, min(FASTEST_STEPS, wanted))
    least_s = max(SHORTEST_SEGMENT_S, PLANNING * plan_s)
    most = max(MOST_SEGMENT_STEPS, min(FASTEST_STEPS, round(least_s / step_s)))
    return max(1, min(most, round((least_s if hasty else max(SEGMENT_S, least_s)) / step_s)))


def slowest_steps(feedback: Feedback, world: int) -> float:
    """Return how many steps all ranks together complete while the slowest trains one batch.

    A step has one batch of each rank. Call this only if ranks share batches, with a result of
    `single_batches` as `feedback`. Return 0 if speeds are unknown.
    """
    if not len(feedback):
        return 0.0
    rows = feedback.by_step(world)
    known = usable(rows.samples, rows.load, rows.compute_s)
    compute_s = np.where(known, rows.compute_s, np.nan)[:, known.any(axis=0)]
    batch_s = np.nanmedian(compute_s, axis=0)
    return float(batch_s.max() * (1 / batch_s).sum() / world) if len(batch_s) else 0.0


def _has_changed_speed(history: History, feedback: Feedback) -> bool:
    """Return True if a rank seems to have changed its speed just now.

    Return False if more than `NOTICED` segments took another time than expected. Then the predictor
    cannot learn the cause, and short segments would only lose time.
    """
    if not len(feedback):
        return False
    rows = feedback.by_step(history.hello.world)
    steps = rows.step[:, 0]
    off = []
    for plan in history.newest:
        row = np.searchsorted(steps, plan.first_step + plan.steps) - 1
        if row >= 0 and steps[row] >= plan.first_step:
            off.append(_is_off(plan, int(steps[row]), rows.compute_s[row]))
    return bool(off) and off[-1] and sum(off) <= NOTICED


def _is_off(plan: Plan, step: int, compute_s: Floats) -> bool:
    """Return True if the compute time of a rank in a step of the segment was not as planned."""
    if not plan.ett_s:
        return False
    expected = np.array(plan.ett_s[step - plan.first_step])
    known = (expected > 0) & (compute_s > 0)
    return bool((np.abs(np.log(compute_s[known] / expected[known])) > SURPRISE).any())
