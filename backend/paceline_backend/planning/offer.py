"""From what a run has done to an offer for its next segment: for controller and simulator."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from paceline.core.pool import is_pooled
from paceline.wire import ALLREDUCE, Segment
from paceline_backend import policies
from paceline_backend.planning.feedback import Window, single_batches
from paceline_backend.planning.history import History
from paceline_backend.policies import Choice, Feedback, Plan, Policy
from paceline_backend.policies.base import Floats, usable
from paceline_backend.policies.streams import plan_stream

# internals.md has these as a table: "How many steps a segment has".
SEGMENT_S = 1.0  # how long a segment should last
MOST_STEPS = 4  # of a segment, because a switch waits for its end
LEAST_S = 0.25  # segments of `MOST_STEPS` that are shorter get more steps
PLANNING = 3.0  # a segment lasts at least so many times as long as planning takes
FASTEST_STEPS = 64  # the most steps of any segment
RELAXED_S, LEAST_RELAXED = 4.0, 16  # seconds, and least steps, under a relaxed synchroniser
OWN_BATCHES = 6  # of the slowest rank in a segment, where ranks share batches: it may wait for one
FIRST_STEPS = 2  # while the time of a step is unknown
YOUNG = 12  # complete steps; while there are fewer, each plan knows much more than the one before
SURPRISE = math.log(1.25)  # log of measured time / ETT: above it, a rank may have changed its speed
NOTICED = 3  # a changed speed surprises so many segments at most; after more, the model is bad


@dataclass(frozen=True)
class Offer:
    """A segment that the leader may adopt, and the plan that it came from."""

    segment: Segment
    plan: Plan


def offer(
    history: History, window: Window, policy: Policy, version: int, plan_s: float = 0.0
) -> Offer:
    """Plans the next segment.

    Args:
        history: of the run.
        window: its feedback.
        policy: to plan with.
        version: of that policy in the run.
        plan_s: what planning the segment after it may take; 0: no time, as in a simulation.

    Raises:
        ValueError: the policy does not keep the run's token budget.
    """
    # Before the problem is made, which takes time with each sample: this fails at each report.
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
        hasty=len(feedback) < YOUNG * hello.world or _surprised(history, feedback),
        plan_s=plan_s,
        relaxed=relaxed,
        slowest=slowest_steps(feedback, hello.world) if shared else 0.0,
    )
    if hello.stream:
        plan, shuffled = plan_stream(policy, feedback, steps, hello.world), False
    else:
        plan, shuffled = _plan(history, policy, version, feedback, steps, choice)
    segment = Segment(
        seq=history.seq,
        epoch=history.epoch,
        first_step=history.step,
        counts=plan.batches.counts.tolist(),
        indices=plan.batches.samples.astype("<u4").tobytes(),
        policy=policy.name,
        version=version,
        source="controller",
        epoch_end=plan.epoch_end,
        ett_s=plan.ett_s,
        shares=plan.shares,
        feedback=window.ranges(),
        shuffled=shuffled,
        moved=plan.moved,
        across=plan.across,
        plan_s=time.perf_counter() - started,
        memory=dict(plan.memory),
        threads=plan.threads,
        synchroniser=plan.synchroniser,
        why=plan.why,
        pooled=shared,
        moves=plan.moves,
        homes=history.shares_data(policy),
        paces=plan.paces,
        anew=history.anew,
    )
    return Offer(segment, plan)


def _plan(
    history: History,
    policy: Policy,
    version: int,
    feedback: Feedback,
    steps: int,
    choice: Choice,
) -> tuple[Plan, bool]:
    """Plans so many steps at most, and says whether the shuffler ran for them."""
    ahead = history.ahead(steps, version, policy)

    def planned(*, shuffle: bool) -> Plan:
        problem = history.problem(steps, version, shuffle=shuffle)
        return policies.plan(policy, problem, feedback, shuffle=shuffle, choice=choice, ahead=ahead)

    shuffle = history.must_shuffle(version)
    plan = planned(shuffle=shuffle)
    if policy.recomposes and not shuffle and history.outdated(plan):
        return planned(shuffle=True), True
    return plan, shuffle


def segment_steps(
    step_s: float | None,
    *,
    hasty: bool = False,
    plan_s: float = 0.0,
    relaxed: bool = False,
    slowest: float = 0.0,
) -> int:
    """How many steps a segment should have.

    Args:
        step_s: what each lasts; None: not known yet.
        hasty: the newest step was not as expected, or few steps are known. Then the next plan
            should wait for as few steps as planning can keep up with.
        plan_s: what planning takes.
        relaxed: all ranks meet at a segment's end only, and go their own ways the longer it is.
        slowest: steps that ranks train together while the slowest rank trains a batch, where they
            share batches; see `slowest_steps`.
    """
    if step_s is None:
        return FIRST_STEPS
    step_s = max(step_s, 1e-6)
    if relaxed:
        wanted = max(round(RELAXED_S / step_s), math.ceil(OWN_BATCHES * slowest))
        return max(LEAST_RELAXED, min(FASTEST_STEPS, wanted))
    least_s = max(LEAST_S, PLANNING * plan_s)
    most = max(MOST_STEPS, min(FASTEST_STEPS, round(least_s / step_s)))
    return max(1, min(most, round((least_s if hasty else max(SEGMENT_S, least_s)) / step_s)))


def slowest_steps(feedback: Feedback, world: int) -> float:
    """How many steps ranks that share batches train together while the slowest trains one batch.

    0: ranks' speeds are unknown.

    Args:
        feedback: of single batches.
        world: ranks, each of which trains a batch in a step.
    """
    if not len(feedback):
        return 0.0
    rows = feedback.by_step(world)
    known = usable(rows.samples, rows.load, rows.compute_s)
    compute_s = np.where(known, rows.compute_s, np.nan)[:, known.any(axis=0)]
    batch_s = np.nanmedian(compute_s, axis=0)
    return float(batch_s.max() * (1 / batch_s).sum() / world) if len(batch_s) else 0.0


def _surprised(history: History, feedback: Feedback) -> bool:
    """Whether a rank seems to have changed its speed just now.

    The newest step took it much more or less time than its plan expected, and that is not so of
    most segments: else time is lost for nothing on what the predictor cannot learn.
    """
    if not len(feedback):
        return False
    rows = feedback.by_step(history.hello.world)
    steps = rows.step[:, 0]
    off = []
    for segment in history.newest:
        row = np.searchsorted(steps, segment.first_step + segment.steps) - 1
        if row >= 0 and steps[row] >= segment.first_step:
            off.append(_off(segment, int(steps[row]), rows.compute_s[row]))
    return bool(off) and off[-1] and sum(off) <= NOTICED


def _off(segment: Segment, step: int, compute_s: Floats) -> bool:
    """Whether a rank's step was a surprise; `compute_s` is that of all, [W]."""
    if not segment.ett_s:
        return False
    expected = np.array(segment.ett_s[step - segment.first_step])
    known = (expected > 0) & (compute_s > 0)
    return bool((np.abs(np.log(compute_s[known] / expected[known])) > SURPRISE).any())
