"""CHRONICA: the paper's worked examples, and what it achieves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import policies
from paceline.policies import Models, Problem
from paceline.policies.presets.chronica import (
    ChronicaShuffler,
    PaperScheduler,
    compensate,
)
from support import gradients
from support.cluster import Cluster, plaid_like

SPEEDS = np.array([1.0, 1.0, 1.5, 3.0]) * 1e-5
OVERHEAD = np.full(4, 0.003)


def problem(held: list[list[float]], batch: int, seed: int = 0, **fields: Any) -> Problem:
    """Samples held by each worker, given by their sizes."""
    sizes = np.array([size for mine in held for size in mine])
    placement = np.repeat(np.arange(len(held)), [len(mine) for mine in held])
    remaining = np.arange(len(sizes))
    values = {"epoch": 0, "first_step": 0, "steps": 1} | fields
    return Problem(
        sizes,
        remaining,
        remaining,
        placement,
        **values,
        global_batch=batch,
        world=len(held),
        seed=seed,
    )


def test_figures_3_and_5_picks() -> None:
    """Two workers, batch of four: 156, 129, 105, 88 → 234 s against 244 s."""
    held = [[171.0, 129.0, 117.0, 105.0], [156.0, 88.0, 139.0]]
    models = Models(np.ones(2), np.zeros(2), np.zeros(2))
    seen = []
    for seed in range(40):
        case = problem(held, batch=4, seed=seed)
        (step,) = PaperScheduler().schedule(case, models).parts
        seen.append([case.sizes[part].tolist() for part in step])
    # With 156 first. Another first pick, which is random, leads elsewhere; nobody else to 129, 105.
    assert [[129.0, 105.0], [156.0, 88.0]] in seen
    assert [[171.0, 105.0], [156.0, 88.0]] in seen, "171 first"


def test_figure_6_shuffling() -> None:
    """Totals 678 and 806; worker 2 gives up 45 and 39, which cost 39 and 27 on worker 1."""
    models = Models(np.array([1.0, 0.5]), np.array([0.0, 25.5]), np.zeros(2))
    case = problem([[300.0, 378.0], [39.0, 27.0, 671.0, 671.0]], batch=3)
    cost = models.a[:, None] * case.sizes + models.c[:, None]
    assert cost[0, :2].sum() == 678
    assert cost[1, 2:].sum() == 806
    assert cost[:, 2].tolist() == [39.0, 45.0]
    assert cost[:, 3].tolist() == [27.0, 39.0]
    placement = ChronicaShuffler(paper=True).shuffle(case, models)
    assert placement.tolist() == [0, 0, 0, 0, 1, 1]
    assert cost[0, placement == 0].sum() == 678 + 39 + 27


def test_compensation_makes_every_frame_weigh_the_same() -> None:
    """Videos of 10 and 600 frames: each frame weighs 1/610 (Eq. 7)."""
    frames = np.eye(610)  # gradient of each frame
    workers = np.array([frames[:10].mean(0), frames[10:].mean(0)])
    step = compensate(workers, np.array([10.0, 600.0]))
    np.testing.assert_allclose(step, np.full(610, 1 / 610))


@pytest.mark.parametrize("loss_mean", ["samples", "size"])
def test_compensated_gradient_is_that_of_one_process(loss_mean: str) -> None:
    """The gradient that ranks are compared with too (tests/integration/train/test_ddp.py)."""
    parts = gradients.split([5, 0, 1, 3], seed=2)

    def gradient(batch: list[gradients.Sample]) -> Any:
        model = gradients.make("mlp", 0)
        gradients.loss_of(model, batch or [gradients.FILLER], loss_mean).backward()
        return np.nan_to_num(gradients.gradient(model).numpy().astype(np.float64))

    load = np.array([float(sum(len(x) for x, _ in part)) for part in parts])
    weight = np.array([float(len(part)) for part in parts]) if loss_mean == "samples" else load
    got = compensate(np.array([gradient(part) for part in parts]), weight)
    want = gradient([sample for part in parts for sample in part])
    assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_compensation_of_an_empty_step_is_refused() -> None:
    with pytest.raises(ValueError, match="loads: all zero"):
        compensate(np.ones((2, 3)), np.zeros(2))


@pytest.mark.parametrize(("seed", "noise"), [(0, 0.0), (1, 0.01)])
def test_close_to_the_fluid_limit_with_learned_speeds(seed: int, noise: float) -> None:
    """From the first step after a switch in mid-epoch on, epoch ends included."""
    training = Cluster(plaid_like(seed=seed), SPEEDS, OVERHEAD, 64, seed=seed, noise=noise)
    training.run(policies.make("bsp"))
    training.run(policies.make("bsp"), 2)
    assert training.over_fluid() > 1.5
    training.forget_placement()
    switched, epochs = training.step, training.epoch + 4
    while training.epoch < epochs:
        training.run(policies.make("chronica"))
    # The slowest of four noisy ranks is a noise's standard deviation above the mean by itself.
    assert training.over_fluid(switched) < 1.01 + 1.2 * noise
    assert training.over_fluid(switched) < training.over_fluid() - 0.03


def test_every_step_has_the_data_sets_mix() -> None:
    """As printed, small samples go first and the epoch ends on large ones."""

    def mean_sizes(picks: str) -> tuple[float, float]:
        training = Cluster(plaid_like(), SPEEDS, OVERHEAD, 64, steps_per_segment=1)
        training.run_epoch(policies.make("bsp"))
        first = training.step
        training.run_epoch(policies.make("chronica", {"picks": picks}))
        means = [load.sum() / 64 for load in training.loads[first : first + 13]]
        return float(np.mean(means[:4])), float(np.mean(means[-4:]))

    start, end = mean_sizes("levelled")
    assert end == pytest.approx(start, rel=0.1)
    start, end = mean_sizes("paper")
    assert end > 1.1 * start


def test_a_worker_that_slows_down_is_relieved_within_five_steps() -> None:
    training = Cluster(plaid_like(), np.full(4, 1e-5), OVERHEAD, 64, steps_per_segment=1)
    policy = policies.make("chronica")
    for _ in range(20):
        training.run(policy)
    training.a = np.array([3e-5, 1e-5, 1e-5, 1e-5])
    slowed = training.step
    for _ in range(12):
        training.run(policy)
    assert training.over_fluid(slowed) > 1.1, "the slow-down is felt"
    assert training.over_fluid(slowed + 5) < 1.06


def test_a_worker_too_slow_for_any_sample_stays_known() -> None:
    """It gets none, so nothing new is learned of it: it must not count as equal again."""
    training = Cluster(plaid_like(8_000), np.array([1.0] * 7 + [8.0]) * 1e-5, np.zeros(8), 32)
    policy = policies.make("chronica")
    training.run(policy)
    learned = training.step
    for _ in range(100):
        training.run(policy)
    assert training.loads[-1][7] == 0
    assert training.over_fluid(learned) < 1.15  # 32/7 samples, rounded up, each; 1.34 if forgotten


def test_levelled_shuffling_balances_at_once_and_moves_little() -> None:
    rng = np.random.default_rng(0)
    held = [rng.uniform(100, 700, 215).tolist() for _ in range(4)]
    models = Models(SPEEDS, np.zeros(4), OVERHEAD)
    case = problem(held, batch=64)

    def totals(placement: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        return SPEEDS * np.bincount(placement, case.sizes, 4)

    level = case.sizes.sum() / (1 / SPEEDS).sum()
    placement = ChronicaShuffler().shuffle(case, models)
    assert totals(placement).max() < 1.005 * level
    surplus = np.maximum(totals(case.placement) - level, 0) / SPEEDS
    moved = case.sizes[placement != case.placement].sum()
    assert moved < 1.01 * surplus.sum()
    paper = ChronicaShuffler(paper=True).shuffle(case, models)
    assert totals(paper).max() > 1.1 * level
