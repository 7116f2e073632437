"""Plans do not depend on the last bits of a fit, nor fits on whether kernels are compiled."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from paceline import policies
from paceline.policies import Feedback, jit
from paceline.policies.predict.linear import LinearPredictor
from support.cluster import Cluster


def measured(seed: int, noise: float, ranks: int = 4, steps: int = 46) -> Feedback:
    rng = np.random.default_rng(seed)
    counts = rng.integers(1, 17, (steps, ranks))
    load = counts * rng.lognormal(4, 0.4, counts.shape)
    compute_s = (load * rng.uniform(0.5, 3, ranks) * 1e-4 + 3e-3) * (
        1 + noise * rng.standard_normal(counts.shape)
    ).clip(0.1)
    zeros = np.zeros(steps * ranks)
    return Feedback(
        step=np.repeat(np.arange(steps), ranks),
        rank=np.tile(np.arange(ranks), steps),
        samples=counts.ravel(),
        load=load.ravel(),
        compute_s=compute_s.ravel(),
        squares=zeros,
        longest=zeros,
        sync_s=zeros,
        step_s=compute_s.max(axis=1).repeat(ranks),
    )


@pytest.mark.parametrize("noise", [0.02, 0.3])
def test_fits_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    for seed in range(20):
        feedback = measured(seed, noise)
        fits = []
        for interpreted in (False, True):
            event = threading.Event()
            if interpreted:
                event.set()
            monkeypatch.setattr(jit, "_interpreting", event)
            made = LinearPredictor(cost="sum").fit(feedback, 4)
            fits.append(np.array([made.a, made.c, made.b]))
        np.testing.assert_array_equal(*fits)


@pytest.mark.parametrize("parameters", [{}, {"picks": "levelled"}, {"ett": "per-sample"}])
def test_chronica_plans_the_same_with_other_last_bits(parameters: dict[str, str]) -> None:
    """Many samples have the same size, so there are many equal exchanges."""
    policy = policies.make("chronica", parameters)
    for seed in range(10):
        sizes = np.random.default_rng(seed).choice([100.0, 200.0, 200.0, 344.0, 500.0], 400)
        slowness = np.array([1.0, 1.1, 1.5, 3.0])
        cluster = Cluster(sizes, 1e-5 * slowness, np.full(4, 3e-3), 64, seed, 0.05)
        for _ in range(6):
            cluster.run(policy)
        problem, feedback = cluster.problem(4, shuffle=True), cluster.feedback()
        plans = []
        for factor in (1.0, 1 + 1e-12, 1 - 1e-12):
            other = replace(feedback, compute_s=feedback.compute_s * factor)
            plans.append(policies.plan(policy, problem, other, shuffle=True)[0].indices)
        assert plans[1:] == plans[:1] * 2
