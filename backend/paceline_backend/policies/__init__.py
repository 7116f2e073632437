"""Policies: predictors, schedulers, shufflers and their presets."""

from paceline_backend.policies import moved
from paceline_backend.policies.base import (
    Allocation,
    Allocator,
    Batches,
    Changes,
    Choice,
    Chooser,
    Feedback,
    KeepPlacement,
    Models,
    Plan,
    Policy,
    Predictor,
    Preset,
    Problem,
    Scheduler,
    Shuffler,
    plan,
)
from paceline_backend.policies.registry import (
    PolicyParameterError,
    UnknownPolicyError,
    get,
    make,
    names,
)

moved.install()

__all__ = [
    "Allocation",
    "Allocator",
    "Batches",
    "Changes",
    "Choice",
    "Chooser",
    "Feedback",
    "KeepPlacement",
    "Models",
    "Plan",
    "Policy",
    "PolicyParameterError",
    "Predictor",
    "Preset",
    "Problem",
    "Scheduler",
    "Shuffler",
    "UnknownPolicyError",
    "get",
    "make",
    "names",
    "plan",
    "warm_up",
]


def warm_up() -> None:
    """Has the kernels of predictors and schedulers compiled: seconds that no plan should wait for.

    Where a cache holds them, they are read from there.
    """
    from paceline_backend.policies.predict import linear
    from paceline_backend.policies.presets import paceline

    linear.warm_up()
    paceline.warm_up()
