"""How long a segment is, and how soon plans follow a change of speed."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.core.cost import Cost
from paceline.core.emulation import Emulation, Slowdown
from paceline_backend import policies
from paceline_backend.planning.offer import (
    FASTEST_STEPS,
    FIRST_STEPS,
    MOST_STEPS,
    SURPRISE,
    segment_steps,
)
from paceline_backend.simulator import Simulation
from support.cluster import plaid_like
from support.records import hello


@pytest.mark.parametrize(
    ("step_s", "steps", "surprised"),
    [
        (None, FIRST_STEPS, FIRST_STEPS),
        (5.0, 1, 1),
        (0.5, 2, 1),
        (0.25, MOST_STEPS, 1),
        (0.1, MOST_STEPS, 2),
        (0.01, 25, 25),
        (0.0, FASTEST_STEPS, FASTEST_STEPS),
    ],
)
def test_steps_of_a_segment(step_s: float | None, steps: int, surprised: int) -> None:
    assert segment_steps(step_s) == steps
    assert segment_steps(step_s, surprised=True) == surprised


@pytest.mark.parametrize(
    ("step_s", "plan_s", "steps", "surprised"),
    [
        (0.1, 0.05, MOST_STEPS, 2),
        (0.1, 0.5, 15, 15),
        (1.0, 1.0, 3, 3),
        (0.01, 60.0, FASTEST_STEPS, FASTEST_STEPS),
    ],
)
def test_a_segment_lasts_until_the_next_is_planned(
    step_s: float, plan_s: float, steps: int, surprised: int
) -> None:
    assert segment_steps(step_s, plan_s=plan_s) == steps
    assert segment_steps(step_s, surprised=True, plan_s=plan_s) == surprised


@pytest.mark.parametrize("policy", ["bsp", "chronica"])
@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("at", range(40, 44))
def test_plans_know_of_a_new_speed_within_five_steps(at: int, factor: float, policy: str) -> None:
    """Wherever in a segment the change comes: what was planned before is still in force."""
    sizes = plaid_like()
    devices = Emulation(
        a_s=[3e-5, 3e-5, 4.5e-5, 9e-5],
        b_s=[0.005] * 4,
        noise=0.02,
        slowdowns=[Slowdown(ranks=[0], factor=factor, first_step=at)],
    )
    start = hello(world=4, global_batch=64, sizes=sizes.astype("<f8").tobytes(), epochs=None)
    run = Simulation(start, devices, policies.make(policy))
    steps, errors = [], []
    while run.step < at + 20:
        ran = run.advance()
        ett_s = np.array(ran.segment.ett_s or np.full(ran.compute_s.shape, np.nan))
        errors += np.abs(ett_s / ran.compute_s - 1)[:, 0].tolist()
        steps += [ran.segment.steps] * ran.segment.steps
    assert errors[at] > 0.5
    assert max(errors[at + 5 :]) < 0.1
    assert max(steps[at + 8 :]) > 1, "segments stay short for ever"


def test_segments_stay_long_where_the_models_do_not_fit() -> None:
    """Padded batches, taken for sums of their sizes: every other step is a surprise."""
    sizes = np.random.default_rng(0).lognormal(3, 1.2, 1600)
    start = hello(world=4, global_batch=16, sizes=sizes.astype("<f8").tobytes(), epochs=None)
    devices = Emulation(a_s=[5e-4] * 4, b_s=[0.005] * 4, cost=Cost(padded=True), noise=0.02)
    run = Simulation(start, devices, policies.make("bsp"))
    steps, surprises = [], []
    while run.step < 160:
        ran = run.advance()
        if run.step > 40 and ran.ett_s is not None:
            surprises += (np.abs(np.log(ran.ett_s / ran.compute_s)) > SURPRISE).any(axis=1).tolist()
            steps.append(ran.segment.steps)
    assert np.mean(surprises) > 0.5, "the models fit: the test tests nothing"
    assert np.mean(steps) > 2.5, "cut to single steps"
