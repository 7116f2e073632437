"""How long a segment is, and how soon plans follow a change of speed."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import policies
from paceline.core.cost import Cost
from paceline.core.emulation import Emulation, Slowdown
from paceline.planning.feedback import single_batches
from paceline.planning.offer import (
    FASTEST_STEPS,
    FIRST_STEPS,
    LEAST_RELAXED,
    MOST_SEGMENT_STEPS,
    SURPRISE,
    YOUNG_STEPS,
    segment_steps,
    slowest_steps,
)
from paceline_backend.simulator import Simulation
from support.cluster import plaid_like
from support.records import hello


@pytest.mark.parametrize(
    ("step_s", "steps", "hasty"),
    [
        (None, FIRST_STEPS, FIRST_STEPS),
        (5.0, 1, 1),
        (0.5, 2, 1),
        (0.25, MOST_SEGMENT_STEPS, 1),
        (0.1, MOST_SEGMENT_STEPS, 2),
        (0.01, 25, 25),
        (0.0, FASTEST_STEPS, FASTEST_STEPS),
    ],
)
def test_steps_of_a_segment(step_s: float | None, steps: int, hasty: int) -> None:
    assert segment_steps(step_s) == steps
    assert segment_steps(step_s, hasty=True) == hasty


@pytest.mark.parametrize(
    ("step_s", "plan_s", "steps", "hasty"),
    [
        (0.1, 0.05, MOST_SEGMENT_STEPS, 2),
        (0.1, 0.5, 15, 15),
        (1.0, 1.0, 3, 3),
        (0.01, 60.0, FASTEST_STEPS, FASTEST_STEPS),
    ],
)
def test_a_segment_lasts_until_the_next_is_planned(
    step_s: float, plan_s: float, steps: int, hasty: int
) -> None:
    assert segment_steps(step_s, plan_s=plan_s) == steps
    assert segment_steps(step_s, hasty=True, plan_s=plan_s) == hasty


@pytest.mark.parametrize(("policy", "factor"), [("bsp", 3.0), ("chronica", 1 / 3)])
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
        ett_s = np.array(ran.plan.ett_s or np.full(ran.compute_s.shape, np.nan))
        errors += np.abs(ett_s / ran.compute_s - 1)[:, 0].tolist()
        steps += [ran.plan.steps] * ran.plan.steps
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
            steps.append(ran.plan.steps)
    assert np.mean(surprises) > 0.5, "the models fit: the test tests nothing"
    assert np.mean(steps) > 2.5, "cut to single steps"


@pytest.mark.parametrize(
    ("step_s", "slowest", "steps"),
    [
        (0.1, 0.0, 40),
        (1.0, 0.0, LEAST_RELAXED),
        (1.0, 1.0, LEAST_RELAXED),
        (1.0, 4.5, 27),  # one of eight ranks is five times slower: 5 · 7.2 / 8
        (0.1, 4.5, 40),
        (1.0, 20.0, FASTEST_STEPS),
    ],
)
def test_the_slowest_rank_gets_some_batches_of_its_own(
    step_s: float, slowest: float, steps: int
) -> None:
    assert segment_steps(step_s, relaxed=True, slowest=slowest) == steps


def one_slow(policy: str) -> Simulation:
    """One of eight ranks takes five times as long for a batch: 1.6 s."""
    devices = Emulation(a_s=[0.02] * 7 + [0.1], b_s=[0.0] * 8)
    start = hello(world=8, global_batch=128, sizes=np.ones(128 * 100).tobytes(), epochs=None)
    return Simulation(start, devices, policies.make(policy))


def test_what_a_step_takes_where_ranks_share_batches() -> None:
    """Whatever part of the newest segment is known: rows of its steps differ."""
    run = one_slow("rna")
    together_s = 8 / (7 / 0.32 + 1 / 1.6)
    for number in range(8):
        plan = run.advance().plan
        step_s = run.window.step_s(run.history.newest)
        assert step_s is not None
        if number > 1:
            assert plan.steps == 27 or plan.epoch_end
            assert step_s == pytest.approx(together_s, rel=0.1)


def test_predictors_get_single_batches() -> None:
    """Speeds are those of the devices, though ranks report several batches in one record."""
    run = one_slow("ad-psgd")
    for _ in range(6):
        run.advance()
    raw = run.window.feedback()
    kept = single_batches(raw, run.history.newest)
    assert raw.samples.max() > 16
    assert set(kept.samples.tolist()) == {0, 16}
    assert kept.compute_s[kept.samples > 0] == pytest.approx(
        np.where(kept.rank == 7, 1.6, 0.32)[kept.samples > 0]
    )
    assert slowest_steps(kept, 8) == pytest.approx(5 * 7.2 / 8)
    newest = kept.batches(8, 16)
    assert (newest.samples == 16).all()
    assert newest.compute_s.mean(axis=0) == pytest.approx([0.32] * 7 + [1.6])
    assert (np.diff(newest.step, axis=0) >= 0).all()
    # The wall time of a step is what its work takes all ranks, in whole and in cut segments.
    assert kept.step_s == pytest.approx(8 / (7 / 0.32 + 1 / 1.6), rel=0.1)
    assert raw.step_s.max() > 2 * kept.step_s.max()
    # Rows of unknown segments stay as they are.
    assert single_batches(raw, []) is raw


def test_segments_of_a_young_run_are_short() -> None:
    sizes = np.ones(64 * 100)
    start = hello(world=4, global_batch=64, sizes=sizes.astype("<f8").tobytes(), epochs=None)
    devices = Emulation(a_s=[0.25 / 16] * 4, b_s=[0.0] * 4)
    run = Simulation(start, devices, policies.make("paceline"))
    steps = [run.advance().plan.steps for _ in range(YOUNG_STEPS + 4)]
    assert steps == [FIRST_STEPS, *[1] * (YOUNG_STEPS - 1), *[MOST_SEGMENT_STEPS] * 4]
