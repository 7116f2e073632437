"""Plans for streams: how fast ranks are, by which the leader picks the samples that it has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.wire import Paces
from paceline_backend.policies.parts import Policy
from paceline_backend.policies.planner import Plan, shares_of
from paceline_backend.policies.predict.linear import LinearPredictor
from paceline_backend.policies.values import Batches, Feedback


def problem_of(policy: Policy) -> str | None:
    """Why a policy cannot plan a stream; None: it can."""
    if policy.streams and not policy.relaxed:
        return None
    return (
        f"{policy.name} cannot plan a stream as it is set: `bsp` and `paceline` can, the latter "
        "with mode=exact and without cost=padded"
    )


def plan_stream(policy: Policy, feedback: Feedback, steps: int, world: int) -> Plan:
    """Plans the next segment of a stream: without samples, which the leader picks.

    Args:
        policy: to plan with.
        feedback: for its predictor.
        steps: of the segment.
        world: W.

    Raises:
        ValueError: the policy cannot plan a stream.
    """
    if reason := problem_of(policy):
        raise ValueError(reason)
    predictor = policy.predictor
    if isinstance(predictor, LinearPredictor):  # batches are picked by the sum of their sizes
        predictor = replace(predictor, cost="sum")
    models = predictor.fit(feedback, world)
    none = np.empty(0, np.int64)
    paces = None
    if models.known:
        paces = Paces(models.a.tolist(), models.c.tolist(), models.b.tolist())
    return Plan(
        Batches(np.zeros((steps, world), np.int64), none),
        ett_s=[],
        shares=shares_of(policy, models, feedback),
        placement=none,
        order=none,
        moved=0,
        epoch_end=False,
        memory={},
        threads=[],
        paces=paces,
    )
