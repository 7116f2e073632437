"""Predictors: what they learn, from how little, and how soon they notice a change."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from paceline.cost import Features
from paceline_backend.policies import Feedback, Models
from paceline_backend.policies.linear import LinearPredictor, PerSamplePredictor

Floats = npt.NDArray[np.float64]


def feedback(
    load: Floats | list[float],
    compute_s: Floats | list[float],
    samples: npt.NDArray[np.int64] | list[int] | None = None,
) -> Feedback:
    """One rank's rows, one per step."""
    n = len(load)
    counts = np.ones(n, np.int64) if samples is None else np.asarray(samples, np.int64)
    return Feedback(
        np.arange(n),
        np.zeros(n, np.int64),
        counts,
        np.asarray(load, np.float64),
        np.asarray(compute_s, np.float64),
        squares=np.zeros(n),
        longest=np.zeros(n),
    )


def ett(models: Models, load: float, samples: int) -> float:
    batch = Features(*(np.array([value]) for value in (samples, load, 0.0, 0.0)))
    return float(models.ett(batch)[0])


@pytest.mark.parametrize("seed", range(3))
def test_learns_all_three_costs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = rng.integers(4, 40, 64)
    load = samples * rng.uniform(300, 500, 64)
    models = LinearPredictor().fit(
        feedback(load, 2e-5 * load + 1e-3 * samples + 0.05, samples), world=1
    )
    assert models.known
    assert models.a[0] == pytest.approx(2e-5, rel=0.05)
    assert ett(models, 2_000, 5) == pytest.approx(0.04 + 0.005 + 0.05, rel=0.05)
    assert ett(models, 16_000, 40) == pytest.approx(0.32 + 0.04 + 0.05, rel=0.05)


def test_unknown_until_every_rank_has_a_row() -> None:
    first_only = Feedback(
        np.array([0, 0, 1, 1]),
        np.array([0, 1, 0, 1]),
        *(np.array([1, 0, 1, 0]) for _ in range(5)),
    )
    for predictor in (LinearPredictor(), PerSamplePredictor()):
        assert not predictor.fit(first_only, world=2).known
        assert not predictor.fit(Feedback.empty(), world=1).known


@pytest.mark.parametrize("predictor", [LinearPredictor(), PerSamplePredictor()])
def test_fewer_than_two_distinct_loads_give_the_ratio(
    predictor: LinearPredictor | PerSamplePredictor,
) -> None:
    models = predictor.fit(feedback([400.0] * 6, [2.0] * 6), world=1)
    assert models.a[0] == pytest.approx(2.0 / 400)
    assert models.c[0] == models.b[0] == 0.0


def test_figure_4_regression() -> None:
    """CHRONICA Fig. 4: size 49 costs 3·49 + 3 = 150 s; after an update to (5, 2), 247 s."""
    load = np.array([10.0, 49.0, 118.0])
    before = PerSamplePredictor().fit(feedback(load, 3 * load + 3), world=1)
    after = PerSamplePredictor().fit(feedback(load, 5 * load + 2), world=1)
    assert ett(before, 49, 1) == pytest.approx(150)
    assert ett(after, 49, 1) == pytest.approx(247)


def test_per_sample_sum_counts_b_once_per_sample() -> None:
    """The erratum: the paper's sum over a batch of four has 4·b where the step cost b."""
    load = np.array([100.0, 200.0, 300.0, 400.0])
    rows = feedback(load, 2 * load + 10, np.full(4, 4))
    assert ett(PerSamplePredictor().fit(rows, world=1), 250, 4) == pytest.approx(540)
    assert ett(LinearPredictor().fit(rows, world=1), 250, 4) == pytest.approx(510, rel=0.01)


@pytest.mark.parametrize("slope", [-1.0, 0.0])
@pytest.mark.parametrize("predictor", [LinearPredictor(), PerSamplePredictor()])
def test_a_is_positive_even_when_the_feedback_says_otherwise(
    predictor: LinearPredictor | PerSamplePredictor, slope: float
) -> None:
    load = np.linspace(100, 200, 10)
    models = predictor.fit(feedback(load, 1000 + slope * load), world=1)
    assert models.a[0] > 0


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_constant_n_under_bsp_forecasts_other_n(noise: float) -> None:
    """n is collinear with the constant: c and b cannot be told apart, and must not run wild."""
    rng = np.random.default_rng(4)
    load = 16 * rng.normal(400, 35, 24)
    compute_s = (2e-5 * load + 0.003) * (1 + noise * rng.standard_normal(24))
    models = LinearPredictor().fit(feedback(load, compute_s, np.full(24, 16)), world=1)
    for n in (4, 8, 30):
        truth = 2e-5 * 400 * n + 0.003
        assert ett(models, 400 * n, n) == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("factor", [3.0, 1.5, 1 / 3])
@pytest.mark.parametrize("since", [2, 3, 5, 20, 40])
def test_a_change_of_speed_is_noticed_at_the_second_step(factor: float, since: int) -> None:
    rng = np.random.default_rng(1)
    load = rng.uniform(3000, 6000, 64)
    speed = np.where(np.arange(64) < 64 - since, 1e-4, 1e-4 * factor)
    noise = 1 + 0.01 * rng.standard_normal(64)
    models = LinearPredictor().fit(feedback(load, speed * load * noise), world=1)
    assert ett(models, 5000, 1) == pytest.approx(5000 * 1e-4 * factor, rel=0.1)


@pytest.mark.parametrize("since", [5, 10, 32, 50])
def test_a_rank_that_slowed_down_and_got_less_load_is_not_thought_flat(since: int) -> None:
    """The balanced load falls as the time rises: one line through both would slope down."""
    rng = np.random.default_rng(2)
    old, new = rng.uniform(7500, 8500, 64 - since), rng.uniform(3500, 4500, since)
    new[:3] = rng.uniform(7500, 8500, 3)  # before it was noticed
    compute_s = np.concatenate([1e-4 * old, 3e-4 * new])
    models = LinearPredictor().fit(feedback(np.concatenate([old, new]), compute_s), world=1)
    assert ett(models, 8000, 1) == pytest.approx(2.4, rel=0.1)
    assert ett(models, 2000, 1) == pytest.approx(0.6, rel=0.1)


@pytest.mark.parametrize("at", range(0, 20, 3))
@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_one_outlier_is_ignored(at: int, factor: float) -> None:
    rng = np.random.default_rng(3)
    load = rng.uniform(3000, 6000, 20)
    compute_s = 1e-4 * load * (1 + 0.01 * rng.standard_normal(20))
    compute_s[at] *= factor
    models = LinearPredictor().fit(feedback(load, compute_s), world=1)
    for other in (1000, 5000, 9000):
        assert ett(models, other, 1) == pytest.approx(1e-4 * other, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_loads_too_alike_to_tell_a_from_b(seed: int) -> None:
    """Noise alone must not decide that a third of the load would take as long."""
    rng = np.random.default_rng(seed)
    load = 6400 * (1 + 0.01 * rng.standard_normal(16))
    compute_s = 1e-4 * load * (1 + 0.03 * rng.standard_normal(16))
    models = LinearPredictor().fit(feedback(load, compute_s, np.full(16, 16)), world=1)
    assert ett(models, 2100, 5) == pytest.approx(0.21, rel=0.15)


def test_a_slow_first_step_does_not_count_for_long() -> None:
    models = LinearPredictor().fit(feedback([4e3, 5e3, 4.5e3], [5.0, 0.5, 0.45]), world=1)
    assert ett(models, 5000, 1) == pytest.approx(0.5)


def test_window_forgets() -> None:
    load = np.linspace(100, 200, 40)
    compute_s = np.where(np.arange(40) < 32, 9.0, 1.0) * load
    models = PerSamplePredictor(window=8).fit(feedback(load, compute_s), world=1)
    assert models.a[0] == pytest.approx(1.0)
