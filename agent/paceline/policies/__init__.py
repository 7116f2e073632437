"""Policies, which choose the samples that each rank trains in the next segment.

A `Policy` is made of parts (`base`). A `Predictor` learns the ranks' speeds. An `Allocator` chooses
how many samples each rank gets, and a `Scheduler` chooses which samples. A `Shuffler` chooses the
rank to which each sample belongs. A `Chooser` picks the gradient synchronisation. A `Preset` is a
policy that users choose by name.

Controller, simulator, what-if and replay call `make` and `plan`. A third party's package registers
a `Preset` with the entry point group ``paceline.policies``:

    policy = make("paceline", {"mode": "free"})
    segment, _ = plan(policy, problem, feedback, shuffle=True)
    segment.assignment.parts[0][3]  # the samples of rank 3 in the first step

`paceline_backend.testing` checks a third party's policy.
"""

from paceline.policies.base import (
    Allocation,
    Allocator,
    Assignment,
    BatchesOf,
    Changes,
    Choice,
    Chooser,
    Feedback,
    KeepPlacement,
    Models,
    Parameters,
    PerRank,
    Policy,
    Predictor,
    Preset,
    Problem,
    Scheduler,
    Shuffle,
    Shuffler,
    plan,
    unsuited,
)
from paceline.policies.parameters import PolicyParameterError, properties
from paceline.policies.registry import UnknownPolicyError, get, make, names, same

__all__ = [
    "Allocation",
    "Allocator",
    "Assignment",
    "BatchesOf",
    "Changes",
    "Choice",
    "Chooser",
    "Feedback",
    "KeepPlacement",
    "Models",
    "Parameters",
    "PerRank",
    "Policy",
    "PolicyParameterError",
    "Predictor",
    "Preset",
    "Problem",
    "Scheduler",
    "Shuffle",
    "Shuffler",
    "UnknownPolicyError",
    "get",
    "make",
    "names",
    "plan",
    "properties",
    "same",
    "unsuited",
    "warm_up",
]


def warm_up() -> None:
    """Compile the kernels of predictors and schedulers, or read them from the cache.

    This takes seconds. Call the function when a process starts, so that no plan waits for a
    compiler.
    """
    from paceline.policies.predict import least_squares, linear
    from paceline.policies.presets import paceline

    linear.warm_up()
    paceline.warm_up()
    least_squares.warm_up()
