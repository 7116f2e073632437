"""From what a run has done to an offer for its next segment: for controller and simulator."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from paceline.wire import Segment
from paceline_backend import policies
from paceline_backend.controller.history import History, Window
from paceline_backend.policies import Feedback, Plan, Policy

SEGMENT_S = 1.0  # what a segment should last,
MOST_STEPS = 4  # but never more steps: a switch waits for the running segment's end,
LEAST_S = 0.25  # unless so many last less than this,
PLANNING = 3.0  # or than planning takes, so many times: it could not keep up,
FASTEST_STEPS = 64  # nor when it has to plan more than this at once
FIRST_STEPS = 2  # while the time of a step is unknown
SURPRISE = math.log(1.25)  # a rank off its ETT by more may have changed its speed


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
    """
    started = time.perf_counter()
    shuffle = history.must_shuffle(version)
    feedback = window.feedback()
    steps = segment_steps(window.step_s(), surprised=_surprised(history, feedback), plan_s=plan_s)
    problem = history.problem(steps, version, shuffle=shuffle)
    plan = policies.plan(policy, problem, feedback, shuffle=shuffle)
    if policy.recomposes and not shuffle and history.outdated(plan):
        shuffle = True
        problem = history.problem(steps, version, shuffle=True)
        plan = policies.plan(policy, problem, feedback, shuffle=True)
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
        shuffled=shuffle,
        moved=plan.moved,
        plan_s=time.perf_counter() - started,
        memory=dict(plan.memory),
        threads=plan.threads,
    )
    return Offer(segment, plan)


def segment_steps(step_s: float | None, *, surprised: bool = False, plan_s: float = 0.0) -> int:
    """How many steps a segment should have.

    Args:
        step_s: what each lasts; None: not known yet.
        surprised: the newest step was not as expected. Then the next plan should wait for as few
            steps as planning can keep up with.
        plan_s: what planning takes.
    """
    if step_s is None:
        return FIRST_STEPS
    step_s = max(step_s, 1e-6)
    least_s = max(LEAST_S, PLANNING * plan_s)
    most = max(MOST_STEPS, min(FASTEST_STEPS, round(least_s / step_s)))
    return max(1, min(most, round((least_s if surprised else max(SEGMENT_S, least_s)) / step_s)))


def _surprised(history: History, feedback: Feedback) -> bool:
    """Whether a rank's newest step took much more or less time than its plan expected."""
    if not len(feedback):
        return False
    newest = int(feedback.step[-1])
    segment = next((s for s in history.newest if 0 <= newest - s.first_step < s.steps), None)
    if segment is None or not segment.ett_s:
        return False
    expected = np.array(segment.ett_s[newest - segment.first_step])
    took = feedback.compute_s[-len(expected) :]
    told = (expected > 0) & (took > 0)
    return bool((np.abs(np.log(took[told] / expected[told])) > SURPRISE).any())
