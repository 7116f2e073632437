"""Which features the loop has with which options, and which of their hooks it calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.distributed import HashStore

from paceline.core.batch_limits.budget import Budget
from paceline.core.batch_limits.shapes import Shapes
from paceline.core.terms import Terms
from paceline.train.environment import Environment
from paceline.train.epochs import EpochSteps
from paceline.train.feature import Feature, Hooks
from paceline.train.features.choice import in_order, made
from paceline.train.features.lost_ranks import RankMonitor
from paceline.train.features.signals import Signals
from paceline.train.profile import Limits
from paceline.train.state import TrainingState
from support.contexts import met, run_context

SIZES = np.ones(16)
SEVERAL = ["RankMonitor", "GatherCheck", "ShapeWarning"]


def terms(shapes: Shapes | None = None) -> Terms:
    return Terms(16, 4, 0, False, "samples", 2, shapes or Shapes())


@contextmanager
def features(world: int, asked: Terms, **options: Any) -> Iterator[list[Feature]]:
    """The features of a session on rank 0, in order."""
    context = run_context(asked, **options)
    state = TrainingState(context, met(world, SIZES, HashStore()))
    all_of_it = in_order(made(state, lambda: None))
    try:
        yield all_of_it
    finally:
        for each in all_of_it:
            each.close()
        state.gate.close()


@pytest.mark.parametrize(
    ("world", "asked", "options", "names"),
    [
        (1, terms(), {}, []),
        (1, terms(), {"uneven_steps": True}, []),
        (2, terms(), {}, SEVERAL),
        (2, terms(Shapes(2)), {}, SEVERAL[:2]),
        (2, terms(), {"uneven_steps": True}, ["RankMonitor", "WorkSharing", *SEVERAL[1:]]),
        (1, terms(), {"limits": Limits([2], True)}, ["MicroBatches"]),
        (
            1,
            terms(),
            {"epoch_steps": EpochSteps(terms(), Budget(4.0, SIZES))},
            ["LearnedLimits"],
        ),
        (1, terms(), {"environment": Environment(reform=Path("reform"))}, ["Reform"]),
    ],
)
def test_a_feature_is_made_only_for_its_option(
    world: int, asked: Terms, options: dict[str, Any], names: list[str]
) -> None:
    with features(world, asked, **options) as all_of_it:
        assert [type(each).__name__ for each in all_of_it] == names


def test_plain_training_calls_no_hook() -> None:
    with features(1, terms()) as all_of_it:
        assert not any(vars(Hooks(all_of_it)).values())


def test_only_overridden_hooks_are_called_in_order() -> None:
    with features(2, terms()) as all_of_it:
        signals = Signals(lambda: True, lambda: None)
        all_of_it = in_order([*all_of_it, signals])
        (monitor,) = (each for each in all_of_it if isinstance(each, RankMonitor))
        hooks = Hooks(all_of_it)
        assert hooks.begin == [signals.begin, monitor.begin]
        assert hooks.end_turn == [monitor.end_turn]
        assert not hooks.begin_turn


def test_hooks_has_each_hook_of_a_feature() -> None:
    known = {name for name in vars(Feature) if not name.startswith("_")}
    assert vars(Hooks([])).keys() == known - {"reads"}
