"""Public import path of the parts of a policy, and of the values that pass between the parts.

    predictor     feedback                        → performance models
    allocator     models, feedback, own state     → how many samples each worker gets (optional)
    scheduler     models, remaining samples       → which samples each worker gets
    shuffler      models, placement               → worker to which each sample belongs
    synchroniser  synchronises gradients; ranks run it, a policy only names it
    chooser       feedback, own state             → the segment's synchronisation (optional)

For each segment, `plan` calls the methods in this order: ``Predictor.fit``; ``Shuffler.shuffle``
and ``Scheduler.compose``, but only at an epoch's start, after a switch of the policy and when a
controller takes over a run; ``Chooser.choose``; ``Allocator.allocate``; ``Scheduler.schedule``.

All parts are pure: no I/O, no clock, no global random state, and no state except the `memory` that
they return and get back with the next call. Parts return new values and change no argument. In the
shapes of arrays, W is the number of workers (ranks), N of samples in the data set, F of feedback
rows, and S of steps in the segment.
"""

from __future__ import annotations

from paceline.policies.parameters import BatchesOf, Parameters, PerRank
from paceline.policies.parts import (
    Allocation,
    Allocator,
    Changes,
    Choice,
    Chooser,
    Criteria,
    KeepPlacement,
    NodeChooser,
    Policy,
    Predictor,
    Preset,
    Scheduler,
    Shuffler,
)
from paceline.policies.planner import Shuffle, plan, unsuited
from paceline.policies.values import (
    Feedback,
    Floats,
    Ints,
    Models,
    Problem,
    Storage,
    usable,
)
from paceline.wire import Assignment

__all__ = [
    "Allocation",
    "Allocator",
    "Assignment",
    "BatchesOf",
    "Changes",
    "Choice",
    "Chooser",
    "Criteria",
    "Feedback",
    "Floats",
    "Ints",
    "KeepPlacement",
    "Models",
    "NodeChooser",
    "Parameters",
    "PerRank",
    "Policy",
    "Predictor",
    "Preset",
    "Problem",
    "Scheduler",
    "Shuffle",
    "Shuffler",
    "Storage",
    "plan",
    "unsuited",
    "usable",
]
