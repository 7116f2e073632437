"""Weights of a rank's gradients in RNA's rounds (Sec. 3.3), by the paper's example (Fig. 4)."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.rounds import Call, Drift
from paceline_backend.simulator.sync import Costs
from paceline_backend.simulator.sync.rounds import SegmentRounds
from support.virtual_rounds import train

# Times at which w_0's and w_1's iterations end. w_0 starts each round as it ends an iteration.
ENDS = [[10.0, 30.0, 50.0, 90.0], [15.0, 25.0, 40.0, 55.0, 65.0, 80.0]]
# Weight of each iteration's gradient in the first four rounds. The first three are Fig. 4's: w_1
# misses the first round, has two gradients in the second, and is ahead of w_0 in the third. In the
# fourth round it has three gradients, of which two were computed with the same parameters.
WEIGHTS = [
    ([1, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
    ([0, 1, 0, 0], [1 / 3, 2 / 3, 0, 0, 0, 0]),
    ([0, 0, 1, 0], [0, 0, 1, 0, 0, 0]),
    ([0, 0, 0, 1], [0, 0, 0, 1 / 6, 2 / 6, 3 / 6]),
]
# Number of gradients in these rounds by age: 0, 1. w_0 computes on while a round is reduced, so its
# own gradients are one round old.
AGES = [[1, 0], [1, 2], [0, 2], [2, 2]]


def printed(newest: int, gap: int) -> list[float]:
    """The formula as printed, for consecutive iterations t from k − τ to k."""
    k, tau = newest, gap
    weights = [t - (k - tau) + 1 for t in range(k - tau, k + 1)]
    return [weight / sum(weights) for weight in weights]


@given(st.integers(0, 10**6), st.integers(0, 64))
def test_weights_are_those_of_the_printed_formula(newest: int, gap: int) -> None:
    assert Drift(mean=True).weights(gap + 1) == pytest.approx(printed(newest, gap))
    assert Drift(mean=False).weights(gap + 1) == [1.0] * (gap + 1)


def test_no_gradient_has_no_weight() -> None:
    assert Drift(mean=True).weights(0) == []


def test_ranks_and_simulator_do_the_papers_example() -> None:
    call = next(
        call
        for call in (Call(probes=1, seed=seed) for seed in count())
        if all(call.drawn(number, [0, 1]) == {0} for number in range(len(WEIGHTS)))
    )
    work_s = [
        [end - begun for begun, end in zip([0.0, *ends], ends, strict=False)] for ends in ENDS
    ]
    samples = [[1] * len(ends) for ends in ENDS]

    def gradient(rank: int, step: int) -> list[float]:
        return [
            float((rank, step) == (of, at))
            for of, ends in enumerate(ENDS)
            for at in range(len(ends))
        ]

    ran = train(call, Drift(), work_s, samples, 0.5, 0.25, gradient=gradient)
    for totals in ran.totals:
        for total, (first, second) in zip(totals, WEIGHTS, strict=False):
            assert total == pytest.approx([*first, *second])
    simulated = SegmentRounds(call, Drift(), work_s, samples, Costs(0.5, 0.25))
    simulated.run([0.0, 0.0])
    for (real, _), each, ages in zip(ran.rounds, simulated.rounds, AGES, strict=False):
        assert real.staleness == each.staleness == [*ages, 0, 0, 0]
        assert real.contributors == each.contributors
