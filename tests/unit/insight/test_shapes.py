"""The cost of samples and steps that all ranks share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.cost import Features
from paceline.policies import Models
from paceline_backend.insight.whatif.measured import MeasuredSteps
from paceline_backend.insight.whatif.shapes import shape

WORLD, STEPS = 4, 120
SPEEDS = np.array([1.0, 1.3, 2.0, 3.0])


def steps(
    *,
    sample: float = 0.0,
    scaled: float = 0.0,
    fixed_s: float | np.ndarray = 0.0,
    counts: tuple[int, int] = (2, 12),
    sizes: tuple[float, float] = (50.0, 150.0),
    noise: float = 0.01,
    seed: int = 0,
) -> MeasuredSteps:
    """Steps of four ranks that take a · (Λ + sample · n + scaled) + fixed_s, a = 1e-4 s a unit."""
    rng = np.random.default_rng(seed)
    samples = rng.integers(*counts, (STEPS, WORLD), endpoint=True)
    load = samples * rng.uniform(*sizes, (STEPS, WORLD))
    compute_s = 1e-4 * SPEEDS * (load + sample * samples + scaled) + fixed_s
    compute_s = compute_s * (1 + noise * rng.standard_normal(compute_s.shape))
    zero = np.zeros_like(compute_s)
    features = Features(samples, load, load**2 / samples, load / samples)
    load_of_steps = load.sum(axis=1)
    return MeasuredSteps(
        np.arange(STEPS), features, compute_s, zero, zero, compute_s, load_of_steps
    )


def own(measured: MeasuredSteps) -> Models:
    """What a predictor says that takes everything for load."""
    a = (measured.compute_s / measured.features.load).mean(axis=0)
    return Models(a, np.zeros(WORLD), np.zeros(WORLD))


def far(models: Models) -> np.ndarray:
    """Times of batches that no rank had: 30 samples of size 20."""
    load, samples = np.full(WORLD, 600.0), np.full(WORLD, 30)
    return models.ett(Features(samples, load, load * 20, np.full(WORLD, 20.0)))


@pytest.mark.parametrize(
    "costs",
    [{"fixed_s": 0.03}, {"scaled": 400.0}, {"sample": 40.0}, {"sample": 20.0, "fixed_s": 0.02}, {}],
    ids=["a step", "a step of a slow rank", "a sample", "both", "neither"],
)
def test_costs_come_out_of_all_ranks_steps(costs: dict[str, float]) -> None:
    measured = steps(**costs)
    expected = (
        1e-4 * SPEEDS * (600.0 + costs.get("sample", 0.0) * 30 + costs.get("scaled", 0.0))
    ) + costs.get("fixed_s", 0.0)
    assert far(shape(own(measured), measured).models()) == pytest.approx(expected, rel=0.03)


def test_what_no_step_tells_is_uncertain() -> None:
    """Counts that stay the same do not tell the cost of a sample from that of a step."""
    blind = steps(scaled=400.0, counts=(7, 7))
    seeing = steps(scaled=400.0)

    def spread(measured: MeasuredSteps) -> float:
        fitted = shape(own(measured), measured)
        times = [far(fitted.models(replicate)) for replicate in (1, 2)]
        return float(np.abs(np.log(times[0] / times[1])).max())

    assert spread(blind) > 0.1
    assert spread(seeing) < 0.02


@given(
    sample=st.floats(0, 60),
    fixed_s=st.floats(0, 0.05),
    count=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_other_models_say_the_same_of_the_measured_steps(
    sample: float, fixed_s: float, count: int, seed: int
) -> None:
    measured = steps(sample=sample, fixed_s=fixed_s, counts=(count, count + 1), seed=seed)
    fitted = shape(own(measured), measured)
    for replicate in range(5):
        models = fitted.models(replicate)
        assert (models.a > 0).all() and (models.c >= 0).all() and (models.b >= 0).all()
        off = np.log(measured.compute_s / models.ett(measured.features))
        assert np.abs(np.median(off, axis=0)).max() < 0.04


def test_what_is_known_of_costs_together_stays_where_one_of_them_is_nothing() -> None:
    """With equal counts one cost is at its bound, and no other model may make up for that."""
    measured = steps(fixed_s=0.002, counts=(14, 14), sizes=(80.0, 120.0), noise=0.04)
    fitted = shape(own(measured), measured)
    for replicate in range(5):
        models = fitted.models(replicate)
        beside = (models.b + 14 * models.c) / np.median(measured.compute_s, axis=0)
        assert beside.max() < 0.06, replicate


def test_ranks_with_costs_of_their_own_keep_them() -> None:
    measured = steps(fixed_s=np.array([0.0, 0.0, 0.0, 0.09]))
    models = own(measured)
    models.b[3], models.a[3] = 0.09, 3e-4
    for replicate in (0, 1):
        assert far(shape(models, measured).models(replicate)) == pytest.approx(
            far(models), rel=0.02
        )


def test_a_better_node_divides_its_ranks_times() -> None:
    measured = steps(fixed_s=0.03)
    fitted = shape(own(measured), measured)
    faster = np.array([1.0, 1.0, 1.0, 3.0])
    assert far(replace(fitted, faster=faster).models(1)) == pytest.approx(
        far(fitted.models(1)) / faster
    )
