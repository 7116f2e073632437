"""From what a run has done to an offer for its next segment: for controller and simulator."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.wire import Segment
from paceline_backend import policies
from paceline_backend.controller.history import History, Window
from paceline_backend.policies import Plan, Policy

SEGMENT_S = 1.0  # what a segment should last,
MOST_STEPS = 4  # but never more steps: a switch waits for the running segment's end,
LEAST_S = 0.25  # unless so many last less than this: planning could not keep up,
FASTEST_STEPS = 64  # nor when it has to plan more than this at once
FIRST_STEPS = 2  # while the time of a step is unknown


@dataclass(frozen=True)
class Offer:
    """A segment that the leader may adopt, and the plan that it came from."""

    segment: Segment
    plan: Plan


def offer(history: History, window: Window, policy: Policy, version: int) -> Offer:
    """Plans the next segment.

    Args:
        history: of the run.
        window: its feedback.
        policy: to plan with.
        version: of that policy in the run.
    """
    started = time.perf_counter()
    shuffle = history.must_shuffle(version)
    problem = history.problem(segment_steps(window.step_s()), version, shuffle=shuffle)
    plan = policies.plan(policy, problem, window.feedback(), shuffle=shuffle)
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


def segment_steps(step_s: float | None) -> int:
    """How many steps a segment should have, of which each lasts so long; None: not known yet."""
    if step_s is None:
        return FIRST_STEPS
    step_s = max(step_s, 1e-6)
    most = max(MOST_STEPS, min(FASTEST_STEPS, round(LEAST_S / step_s)))
    return max(1, min(most, round(SEGMENT_S / step_s)))
