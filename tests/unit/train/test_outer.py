"""The outer optimiser's state: which switches it survives."""

from __future__ import annotations

import pytest
import torch

from paceline.train.sync.outer import Outer
from paceline.wire import ALLREDUCE
from paceline.wire.synchronisation import Averaging, Synchronisation, convert

DILOCO = convert("averaging", {"every": 4, "outer": {"rate": 0.5, "momentum": 0.9}})
OTHERS = {
    "all-reduce": ALLREDUCE,
    "local-sgd": convert("averaging", {"every": 4}),
    "pairwise": convert("pairwise"),
}


def step(outer: Outer, parameters: float, mean: float) -> float:
    """Begin under `DILOCO` at equal parameters, and step from their mean; return a new value."""
    assert isinstance(DILOCO, Averaging)
    rules = DILOCO.parameters.outer
    assert rules is not None
    outer.keep_for(DILOCO)
    outer.begin([[torch.full((3,), parameters)]])
    return float(outer.step(rules, 0, torch.full((3,), mean))[0])


def test_the_state_continues_under_the_same_synchroniser() -> None:
    outer = Outer()
    assert step(outer, 0.0, 1.0) == pytest.approx(0.5 * (1 + 0.9))
    assert outer.state()
    # From the anchor at 0.95, with momentum, and not from the parameters.
    assert step(outer, 5.0, 0.95) == pytest.approx(0.95 + 0.5 * 0.9 * 0.9)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_the_state_ends_when_another_synchroniser_takes_effect(other: Synchronisation) -> None:
    """Otherwise the first outer step after it would undo what was trained meanwhile."""
    outer = Outer()
    step(outer, 0.0, 1.0)
    outer.keep_for(other)
    assert not outer.state(), "what a checkpoint would hold"
    assert step(outer, 5.0, 5.0) == 5.0
