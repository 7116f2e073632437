"""Plans for streams, whose samples the controller does not know.

A plan for a stream contains only the ranks' measured speeds. With these speeds, the leader divides
the samples that the ranks have read. For streams, `planning.offer` calls `plan_stream` instead of
`planner.plan`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.policies.parts import Policy
from paceline.policies.planner import shares_of
from paceline.policies.predict.linear import LinearPredictor
from paceline.policies.values import Feedback, Problem
from paceline.wire import Assignment, Paces, Plan


def problem_of(policy: Policy) -> str | None:
    """Return the reason why a policy cannot plan a stream, or None."""
    if policy.streams and not policy.relaxed:
        return None
    return (
        f"{policy.name} cannot plan a stream with these parameters: use `bsp`, or `paceline` with "
        "mode=exact and without cost=padded"
    )


def plan_stream(policy: Policy, problem: Problem, feedback: Feedback) -> Plan:
    """Plan the next segment of a stream.

    Raises:
        ValueError: the policy cannot plan a stream.
    """
    if reason := problem_of(policy):
        raise ValueError(reason)
    predictor = policy.predictor
    # The leader balances the sums of the sizes, so the speeds must be fitted to the same cost.
    if isinstance(predictor, LinearPredictor):
        predictor = replace(predictor, cost="sum")
    models = predictor.fit(feedback, problem.world)
    paces = None
    if models.known:
        paces = Paces(models.a.tolist(), models.c.tolist(), models.b.tolist())
    none = Assignment(np.zeros((problem.steps, problem.world), np.int64), np.empty(0, np.int64))
    return Plan(
        seq=problem.seq,
        epoch=problem.epoch,
        first_step=problem.first_step,
        counts=none.counts.tolist(),
        indices=b"",
        policy=policy.name,
        version=problem.version,
        source="controller",
        epoch_end=False,
        shares=shares_of(policy, models, feedback),
        paces=paces,
    ).keeping(none)
