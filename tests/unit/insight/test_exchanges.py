"""What exchanges of few ranks take, as an all-reduce of all was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.cost import Features
from paceline_backend.insight.whatif.measured import (
    _PAIR,
    MeasuredSteps,
    _all_reduce,
    _scaled,
)
from paceline_backend.simulator.scenario import Communication

STEPS = 20


def measured(world: int, gradient_bytes: int | None, round_s: float) -> MeasuredSteps:
    """Steps whose all-reduce takes so long."""
    ones = np.ones((STEPS, world))
    features = Features(ones.astype(np.int64), ones, ones, ones)
    return MeasuredSteps(
        step=np.arange(STEPS),
        features=features,
        compute_s=ones,
        data_s=0 * ones,
        sync_s=round_s * ones,
        rank_step_s=(1 + round_s) * ones,
        load=ones.sum(axis=1),
        gradient_bytes=gradient_bytes,
    )


@pytest.mark.parametrize(
    "network",
    [
        Communication(latency_s=1e-3, bytes=4_000, bandwidth=1.25e9),  # messages take the time
        Communication(latency_s=1e-6, bytes=1e9, bandwidth=1.25e8),  # bytes do
        Communication(latency_s=2e-3, bytes=1e6, bandwidth=1.25e8),  # both
    ],
)
@pytest.mark.parametrize("world", [2, 8, 64])
def test_pairs_and_groups_take_what_the_network_gives_them(
    network: Communication, world: int
) -> None:
    true = network.costs(world)
    costs = measured(world, round(network.bytes), true.round_s).costs()
    assert costs.round_s == pytest.approx(true.round_s)
    assert costs.pair_s == pytest.approx(true.pair_s, rel=0.15)
    assert costs.group_s is not None
    assert true.group_s is not None
    assert costs.group_s(world // 2) == pytest.approx(true.group_s(world // 2), rel=0.15)


def test_of_a_model_of_unknown_size_all_time_is_that_of_bytes() -> None:
    costs = measured(8, None, 0.7).costs()
    assert costs.pair_s == pytest.approx(0.8)
    assert costs == replace(measured(8, 10**12, 0.7).costs(), group_s=costs.group_s)


def test_a_rank_without_others_exchanges_nothing() -> None:
    assert measured(1, 1_000, 0.0).costs().pair_s == 0


@given(
    seconds=st.floats(1e-6, 10),
    world=st.integers(2, 1_000),
    gradient_bytes=st.none() | st.integers(0, 10**12),
)
def test_there_and_back(seconds: float, world: int, gradient_bytes: int | None) -> None:
    """A pair's time as an all-reduce's, and that as a pair's, is the same again."""
    whole = _scaled(seconds, _PAIR, _all_reduce(world), gradient_bytes)
    again = _scaled(whole, _all_reduce(world), _PAIR, gradient_bytes)
    assert again == pytest.approx(seconds, rel=1e-6)
