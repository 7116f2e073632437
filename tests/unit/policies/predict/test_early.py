"""Costs that a young run's records do not rule out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.cost import SUM, Cost, Features, features
from paceline.policies import Feedback, Models
from paceline.policies.predict.early import YOUNG_ROWS, plausible
from paceline.policies.predict.linear import LinearPredictor
from support.simulated import rows_of

WORLD, LOCAL = 4, 16


def rows(
    cost: Cost,
    steps: int,
    *,
    seed: int = 0,
    noise: float = 0.03,
    by_count: bool = False,
    spread: float = 1.0,
) -> Feedback:
    """Steps of ranks of which one is twice as slow; the first step takes twice as long."""
    rng = np.random.default_rng(seed)
    sizes = 100 * rng.lognormal(0, spread, steps * WORLD * LOCAL)
    of = features(sizes, np.full((steps, WORLD), LOCAL))
    load = np.array(of.samples, float) if by_count else cost.load(of)
    time_s = load * np.array([1.0, 2.0, 1.0, 1.0]) * np.exp(noise * rng.normal(size=load.shape))
    time_s[0] *= 2
    return rows_of(of, time_s)


COSTS = [SUM, Cost(0.01), Cost(padded=True), Cost(0.01, padded=True)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cost", COSTS)
def test_four_steps_tell_the_cost(cost: Cost, seed: int) -> None:
    best = plausible(rows(cost, 4, seed=seed).by_step(WORLD))[0]
    assert best.probability > 0.7
    assert best.sized == 1
    assert (best.cost.padded, best.cost.kappa > 0) == (cost.padded, cost.kappa > 0)
    if cost.kappa:
        assert best.cost.kappa == pytest.approx(cost.kappa, rel=0.7)


def test_four_steps_tell_that_only_samples_count() -> None:
    feedback = rows(SUM, 4, by_count=True)
    assert plausible(feedback.by_step(WORLD))[0].sized < 0.1
    models = LinearPredictor(cost="auto").fit(feedback, WORLD)
    sizes = np.array([1.0, 1000.0])
    small, large = models.ett(
        Features(
            np.array([8, 8])[:, None],
            *(
                np.repeat(value[:, None], WORLD, axis=1)
                for value in (8 * sizes, 8 * sizes**2, sizes)
            ),
        )
    )
    # Their sizes are 1,000 to 1. A little stays with them, which levels loads at equal counts.
    assert np.all(large > small)
    assert large == pytest.approx(small, rel=0.3)


def test_equal_sizes_tell_nothing() -> None:
    chances = [each.probability for each in plausible(rows(SUM, 4, spread=0.0).by_step(WORLD))]
    assert len(chances) == 5
    assert max(chances) < 0.5


@given(st.integers(0, 50), st.integers(1, 6), st.floats(0.0, 0.5), st.sampled_from(COSTS))
def test_probabilities_descend_and_their_sum_is_at_most_1(
    seed: int, steps: int, noise: float, cost: Cost
) -> None:
    made = plausible(rows(cost, steps, seed=seed, noise=noise).by_step(WORLD))
    chances = [each.probability for each in made]
    assert chances == sorted(chances, reverse=True)
    assert 0.9 <= sum(chances) <= 1 + 1e-9


def test_a_run_without_records_may_be_padded() -> None:
    models = LinearPredictor(cost="auto").fit(Feedback.empty(), WORLD)
    assert not models.known
    assert models.cautious.cost.padded


def test_a_given_cost_has_no_rivals() -> None:
    for cost in ("sum", "padded"):
        assert not LinearPredictor(cost=cost).fit(rows(SUM, 1), WORLD).rivals


def test_an_old_run_has_no_rivals() -> None:
    feedback = rows(SUM, YOUNG_ROWS, spread=0.05, noise=0.2)
    young = feedback.step < 4
    early = Feedback(
        *(
            getattr(feedback, name)[young]
            for name in ("step", "rank", "samples", "load", "compute_s", "squares", "longest")
        )
    )
    assert LinearPredictor(cost="auto").fit(early, WORLD).rivals
    assert not LinearPredictor(cost="auto").fit(feedback, WORLD).rivals


def test_models_are_cautious_about_padding() -> None:
    ones = np.ones(2)
    padded = Models(ones, ones, ones, cost=Cost(padded=True))
    either = Models(ones, ones, ones, rivals=((0.1, padded),))
    assert either.cautious is padded
    assert [chance for chance, _ in either.weighed()] == pytest.approx([0.9, 0.1])
    assert Models(ones, ones, ones).cautious.cost == SUM
