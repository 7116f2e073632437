"""Predictors: what they learn, from how little, and how soon they notice a change."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline import policies
from paceline.core.cost import SUM, Cost, Features, features
from paceline.core.emulation import Emulation
from paceline.policies import Feedback, Models
from paceline.policies.predict.linear import LinearPredictor, PerSamplePredictor
from paceline_backend.simulator import Simulation
from support.records import hello
from support.simulated import rows_of

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


def test_learns_all_three_costs() -> None:
    rng = np.random.default_rng(0)
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


@pytest.mark.parametrize("nonsense", [5e-324, 1e-200])
def test_rows_whose_squares_are_0_are_left_out(nonsense: float) -> None:
    """Any rank may report them."""
    sound = feedback([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    expected = LinearPredictor().fit(sound, 1)
    for load, compute_s in [(nonsense, 1.0), (1.0, nonsense), (nonsense, nonsense)]:
        rows = feedback([1.0, 2.0, 3.0, load], [1.0, 2.0, 3.0, compute_s])
        models = LinearPredictor().fit(rows, 1)
        assert np.allclose([models.a, models.c, models.b], [expected.a, expected.c, expected.b])
    assert not LinearPredictor().fit(feedback([nonsense], [1.0]), 1).known


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


@pytest.mark.parametrize("per_sample", [True, False])
def test_times_that_do_not_depend_on_sizes_are_not_divided_by_them(per_sample: bool) -> None:
    rng = np.random.default_rng(0)
    samples = rng.integers(12, 20, 48)
    load = samples * rng.lognormal(5, 0.4, 48)
    time_s = samples / 16 if per_sample else np.ones(48)
    rows = feedback(load, time_s * (1 + 0.05 * rng.standard_normal(48)), samples)
    models = LinearPredictor().fit(rows, world=1)
    for size in (50, 150, 600):
        assert ett(models, 16 * size, 16) == pytest.approx(1.0, rel=0.15)


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


def random_levels(rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.int64]]:
    return rng.choice([50.0, 150.0], 84), np.ones(84, np.int64)


def alternating_levels(rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.int64]]:
    return np.tile([50.0, 150.0], 42), np.ones(84, np.int64)


def levels_in_blocks(rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.int64]]:
    return np.resize(np.repeat([50.0, 150.0], 5), 84), np.ones(84, np.int64)


def few_counts(rng: np.random.Generator) -> tuple[Floats, npt.NDArray[np.int64]]:
    samples = rng.integers(1, 4, 84)
    return samples * 100.0, samples


LEVELS = [random_levels, alternating_levels, levels_in_blocks, few_counts]
Levels = Callable[[np.random.Generator], tuple[Floats, npt.NDArray[np.int64]]]


def with_share(
    share: float, levels: Levels, seed: int
) -> tuple[Floats, npt.NDArray[np.int64], Floats]:
    """Loads, samples and times of one rank, of which b has that share; noise 1 %."""
    rng = np.random.default_rng(seed)
    load, samples = levels(rng)
    time_s = 1e-3 * (load + share / (1 - share) * load.mean())
    return load, samples, time_s * (1 + 0.01 * rng.standard_normal(len(load)))


@pytest.mark.parametrize(("levels", "share"), list(zip(LEVELS, [0.3, 0.9, 0.7, 0.5], strict=True)))
def test_rows_of_another_load_are_not_taken_for_another_speed(levels: Levels, share: float) -> None:
    """As far off as at a change of speed, until b is known."""
    for seed in range(3):
        load, samples, time_s = with_share(share, levels, seed)
        errors = []
        for at in range(12, 84):
            past = slice(max(0, at - 64), at)
            rows = feedback(load[past], time_s[past], samples[past])
            models = LinearPredictor().fit(rows, world=1)
            errors.append(abs(ett(models, load[at], int(samples[at])) / time_s[at] - 1))
        assert np.mean(errors) < 0.012
        assert max(errors[20:]) < 0.06


@pytest.mark.parametrize(("share", "factor"), [(0.5, 3.0), (0.9, 1.5), (0.9, 1 / 3)])
@pytest.mark.parametrize("levels", LEVELS)
def test_a_change_of_speed_is_noticed_at_the_second_step_whatever_b(
    levels: Levels, share: float, factor: float
) -> None:
    for seed, since in enumerate((2, 3, 10)):
        load, samples, time_s = with_share(share, levels, seed)
        time_s[64 - since :] *= factor
        rows = feedback(load[:64], time_s[:64], samples[:64])
        models = LinearPredictor().fit(rows, world=1)
        expected = [ett(models, at, int(n)) for at, n in zip(load[64:], samples[64:], strict=True)]
        assert expected == pytest.approx(time_s[64:], rel=0.12)


@pytest.mark.parametrize(("policy", "local"), [("bsp", 1), ("paceline", 2)])
def test_batches_of_few_samples_of_two_sizes(policy: str, local: int) -> None:
    """b about what the load takes: the ETT error asked for, and segments as long as usual."""
    sizes = np.random.default_rng(0).choice([20.0, 180.0], 200 * local)
    start = hello(world=4, global_batch=4 * local, sizes=sizes.astype("<f8").tobytes(), epochs=None)
    a_s = [0.02 / (100 * local) * speed for speed in (1, 1, 1.5, 3)]
    devices = Emulation(a_s=a_s, b_s=[0.02] * 4, noise=0.01)
    run = Simulation(start, devices, policies.make(policy))
    errors, steps = [], []
    while run.step < 100:
        ran = run.advance()
        if run.step > 24 and ran.ett_s is not None:
            computed = ran.compute_s > 0
            errors += (np.abs(ran.ett_s[computed] / ran.compute_s[computed] - 1)).tolist()
            steps.append(ran.plan.steps)
    assert np.mean(errors) < 0.015
    assert np.mean(steps) > 3.5, "of 4: every step seemed to tell of a new speed"


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


@dataclass
class Cluster:
    """What eight ranks of different speeds did: batches and times, [steps, W]."""

    batches: Features
    compute_s: Floats

    def feedback(self, first: int, last: int) -> Feedback:
        """Feedback of steps [first, last)."""
        return rows_of(self.at(slice(first, last)), self.compute_s[first:last])

    def at(self, step: int | slice) -> Features:
        return Features(*(column[step] for column in self.batches))

    def errors(self, first: int, last: int, cost: str = "sum") -> Floats:
        """|ETT / T − 1| of steps [first, last), each told all before it, [steps, W]."""
        errors = []
        for step in range(first, last):
            rows = self.feedback(max(0, step - 64), step)
            models = LinearPredictor(cost=cost).fit(rows, world=8)
            errors.append(np.abs(models.ett(self.at(step)) / self.compute_s[step] - 1))
        return np.array(errors)


def cluster(noise: float, cost: Cost = SUM, steps: int = 100, seed: int = 0) -> Cluster:
    rng = np.random.default_rng(seed)
    counts = rng.integers(8, 25, (steps, 8))
    batches = features(45 * rng.lognormal(-0.125, 0.5, counts.sum()), counts)
    work = rng.uniform(1e-4, 3e-4, 8) * cost.load(batches)
    time_s = work + 0.05 * work.mean(axis=0)
    return Cluster(batches, time_s * (1 + noise * rng.standard_normal((steps, 8))))


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
def test_steady_forecasts_are_as_good_as_the_noise_lets_them_be(noise: float) -> None:
    error = cluster(noise).errors(20, 100)
    assert error.mean() <= noise * math.sqrt(2 / math.pi) * 1.06 + 1e-3


@pytest.mark.parametrize(
    ("factor", "noise"), [(1.3, 0.0), (1 / 1.3, 0.02), (3.0, 0.02), (1.3, 0.05), (1 / 3, 0.05)]
)
def test_lasting_changes_are_noticed_and_no_others(noise: float, factor: float) -> None:
    """After two steps; the bound asked for is five."""
    for seed in range(2):
        made = cluster(noise, seed=seed)
        made.compute_s[70:, 3] *= factor
        error = made.errors(70, 90)
        assert error[:2, 3].mean() > 0.15, "the change was foreseen: the test tests nothing"
        assert error[5:, 3].mean() <= 1.3 * noise + 1e-3
        assert np.delete(error, 3, axis=1).mean() <= 0.9 * noise + 1e-3


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("at", [63, 62, 0])
def test_one_outlier_moves_no_forecast_by_3_percent(noise: float, at: int) -> None:
    made = cluster(noise, steps=65)
    usual = LinearPredictor().fit(made.feedback(0, 64), world=8).ett(made.at(64))
    made.compute_s[at, 3] *= 10
    got = LinearPredictor().fit(made.feedback(0, 64), world=8).ett(made.at(64))
    assert got == pytest.approx(usual, rel=0.03)


def test_a_slow_drift_is_followed() -> None:
    """Half a percent a step: the window's mean would be 15 % behind."""
    for noise in (0.0, 0.02):
        made = cluster(noise)
        made.compute_s[:, 3] *= 1.005 ** np.arange(100)
        assert made.errors(40, 100)[:, 3].mean() < 0.05


def test_periodic_slowdowns_cost_the_steps_in_which_they_come_and_go() -> None:
    made = cluster(0.02)
    made.compute_s[np.arange(100) % 20 < 10, 3] *= 2
    error = made.errors(40, 100)[:, 3]
    since = np.arange(40, 100) % 10
    assert error[since >= 2].mean() < 0.04
    assert error[since < 2].mean() > 0.3


COSTS = [SUM, Cost(padded=True), Cost(kappa=1 / 45), Cost(kappa=1 / 45, padded=True)]


@pytest.mark.parametrize(
    ("cost", "noise"), [(COSTS[0], 0.05), (COSTS[1], 0.02), (COSTS[2], 0.05), (COSTS[3], 0.0)]
)
def test_finds_out_what_a_batch_costs_and_keeps_to_it(cost: Cost, noise: float) -> None:
    made = cluster(noise, cost, steps=150)
    near = {0.0: 0.05, 0.02: 0.5, 0.05: 1.0}[noise]  # of κ, which noise hides
    for step in range(40, 150, 10):
        fitted = (
            LinearPredictor(cost="auto").fit(made.feedback(max(0, step - 64), step), world=8).cost
        )
        assert fitted.padded == cost.padded
        assert fitted.kappa == pytest.approx(cost.kappa, rel=near)
    assert made.errors(130, 150, "auto").mean() <= 0.9 * noise + 1e-3


FEW_LENGTHS = [
    ([50.0, 150.0], 2, Cost(kappa=1 / 125, padded=True), 0.0, 0.03),
    ([100.0, 1000.0], 2, Cost(kappa=1 / 750, padded=True), 0.0, 0.03),
    ([50.0, 150.0], 16, Cost(kappa=1 / 125), 0.3, 0.0),
]


@pytest.mark.parametrize(("lengths", "samples", "cost", "fixed", "noise"), FEW_LENGTHS)
def test_of_batches_of_few_lengths_no_cost_wins_that_is_unsure_of_its_forecasts(
    lengths: list[float], samples: int, cost: Cost, fixed: float, noise: float
) -> None:
    """A wrong cost takes rows for changes of speed; after each it knows little, and errs much.

    Each 16th step is a thirtieth of the others, as at an epoch's end.
    """
    wrong = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        counts = np.full((64, 8), samples)
        counts[15::16] = max(1, samples // 30)
        seen, later = (
            features(rng.choice(lengths, made.sum()), made)
            for made in (counts, rng.integers(1, 2 * samples, (100, 8)))
        )
        typical_s = float(np.median(cost.load(seen)))
        time_s = (cost.load(seen) / typical_s + fixed) * np.exp(noise * rng.normal(size=(64, 8)))
        models = LinearPredictor(cost="auto").fit(Cluster(seen, time_s).feedback(0, 64), world=8)
        forecast = models.ett(later) / (cost.load(later) / typical_s + fixed)
        wrong.append(float(np.sqrt((np.log(forecast) ** 2).mean())))
    assert max(wrong) < 0.02


@pytest.mark.parametrize("seed", range(2))
def test_one_row_that_shows_more_than_all_others_decides_no_cost(seed: int) -> None:
    """Nearly every batch has one of the longest samples, so few rows show what padding costs."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(8, 25, (64, 8))
    batches = features(rng.choice([64.0, 128.0, 256.0, 512.0], counts.sum()), counts)
    compute_s = Cost(padded=True).load(batches) / 8_192 + counts / 32
    rows = Cluster(batches, compute_s).feedback(0, 64)
    assert LinearPredictor(cost="auto").fit(rows, world=8).cost == Cost(padded=True)


def test_rows_without_squares_and_maxima_are_sums() -> None:
    """As they were recorded before there were such columns."""
    rows = cluster(0.0, Cost(padded=True)).feedback(0, 64)
    assert LinearPredictor(cost="auto").fit(rows, world=8).cost.padded
    rows.longest[8 * 40 :] = 0.0
    old = replace(rows, longest=np.where(rows.step < 40, 0.0, rows.longest))
    assert LinearPredictor(cost="auto").fit(old, world=8).cost == SUM


def test_padding_is_still_believed_in_once_batches_are_grouped_by_size() -> None:
    """Then sums and padded sizes are nearly the same, and noise hides which it is."""
    rng = np.random.default_rng(6)
    counts = rng.integers(8, 25, (64, 8))
    middle = np.repeat(45 * rng.lognormal(-0.125, 0.5, (64, 8)).ravel(), counts.ravel())
    batches = features(middle * rng.uniform(0.995, 1.005, counts.sum()), counts)
    compute_s = 1e-4 * Cost(padded=True).load(batches) * (1 + 0.05 * rng.standard_normal((64, 8)))
    rows = Cluster(batches, compute_s).feedback(0, 64)
    assert LinearPredictor(cost="auto").fit(rows, world=8).cost.padded


@pytest.mark.parametrize("seed", range(3))
def test_padding_is_still_believed_in_where_only_the_first_steps_were_equal(seed: int) -> None:
    """Few sizes are huge, and one rank gets them. Two steps with equal counts told the padding."""
    rng = np.random.default_rng(seed)
    counts, sizes = [], []
    for step in range(60):
        drawn = np.sort(np.clip(rng.lognormal(4.6, 1.0, 512), 16, 8600))
        if step < 2:
            drawn = rng.permutation(drawn)
            few = 256
        else:  # counts that make the longer of both padded batches shortest
            few = min(range(1, 512), key=lambda n: max(n * drawn[-1], (512 - n) * drawn[511 - n]))
        counts.append([512 - few, few])
        sizes.append(drawn)
    batches = features(np.concatenate(sizes), np.array(counts))
    compute_s = 1e-4 * Cost(padded=True).load(batches) * np.exp(0.3 * rng.normal(size=(60, 2)))
    for steps in (23, 24, 28, 40, 60):
        rows = Cluster(batches, compute_s).feedback(0, steps)
        assert LinearPredictor(cost="auto").fit(rows, world=2).cost.padded, steps


def noisy(speed: Floats, noise: float, seed: int) -> Feedback:
    """64 steps of ranks that take so long for the same load."""
    rng = np.random.default_rng(seed)
    load = rng.uniform(300, 500, (64, len(speed)))
    time_s = 1e-4 * load * speed * (1 + noise * rng.standard_normal(load.shape))
    return rows_of(Features(np.full(load.shape, 8), load, load**2 / 8, load / 8), time_s)


def seconds(models: Models) -> Floats:
    """What a usual batch takes each rank."""
    return models.a * 400 + models.c * 8 + models.b


def test_ranks_that_are_equally_fast_mostly_get_one_fit() -> None:
    speed = np.where(np.arange(8) < 4, 1.0, 2.0)
    same = 0
    for seed in range(10):
        models = LinearPredictor().fit(noisy(speed, 0.03, seed), 8)
        costs = np.stack([models.a, models.c, models.b])
        same += np.unique(costs, axis=1).shape[1] == 2
        assert seconds(models)[4:].min() > 1.9 * seconds(models)[:4].max()
    assert same >= 8


def test_ranks_that_differ_more_than_by_noise_keep_their_own_fits() -> None:
    """Also where each is near to the next one: noise lets the levels be off by 0.5 %."""
    speed = 1 + 0.1 * np.arange(8)
    for seed in range(10):
        rows = noisy(speed, 0.03, seed)
        apart, drawn = (
            seconds(LinearPredictor(shrink=shrink).fit(rows, 8)) for shrink in (False, True)
        )
        np.testing.assert_allclose(drawn, apart, rtol=1e-3)


@pytest.mark.parametrize(("world", "slower"), [(8, 0.03), (64, 0.04), (256, 0.05)])
def test_a_rank_that_is_a_little_slower_than_many_equal_ones_stays_slower(
    world: int, slower: float
) -> None:
    speed = np.ones(world)
    speed[5] += slower
    for seed in range(3):
        taken_s = seconds(LinearPredictor().fit(noisy(speed, 0.03, seed), world))
        assert taken_s[5] > (1 + slower / 3) * np.median(taken_s)


def test_ranks_of_other_costs_that_take_as_long_for_usual_batches_keep_theirs() -> None:
    """Four take 0.1 ms a unit, four half of that and 20 ms a step."""
    rows = noisy(np.repeat([1.0, 0.5], 4), 0.03, 0)
    rows = replace(rows, compute_s=rows.compute_s + np.where(rows.rank < 4, 0.0, 0.02))
    models = LinearPredictor().fit(rows, 8)
    half_s = models.a * 200 + models.c * 8 + models.b
    np.testing.assert_allclose(half_s, np.repeat([0.02, 0.03], 4), rtol=0.08)


@given(
    noise=st.floats(0.001, 0.2),
    spread=st.floats(0, 0.3),
    seed=st.integers(0, 99),
    world=st.integers(2, 12),
    fewer=st.sampled_from([0, 1, 32]),
)
def test_drawing_together_makes_no_rank_faster_or_slower_than_all_seemed(
    noise: float, spread: float, seed: int, world: int, fewer: int
) -> None:
    """Also where every second rank has fewer rows, so that its fit is less sure."""
    speed = np.exp(spread * np.random.default_rng(seed).standard_normal(world))
    rows = noisy(speed, noise, seed)
    empty = (rows.rank % 2 == 1) & (rows.step < fewer)
    rows = replace(rows, samples=np.where(empty, 0, rows.samples))
    apart, drawn = (
        seconds(LinearPredictor(shrink=shrink).fit(rows, world)) for shrink in (False, True)
    )
    assert drawn.min() >= apart.min() * (1 - 1e-9)
    assert drawn.max() <= apart.max() * (1 + 1e-9)


def test_ranks_are_independent_of_each_other() -> None:
    """Each is fitted as if it were alone, whatever rows the others lack."""
    rows = cluster(0.02).feedback(0, 64)
    idle = (rows.rank == 2) & (rows.step % 3 > 0)
    rows = replace(rows, samples=np.where(idle, 0, rows.samples))
    together = LinearPredictor(shrink=False).fit(rows, world=8)
    for rank in range(8):
        mine = replace(rows.of(rank), rank=np.zeros(len(rows.of(rank)), np.int64))
        alone = LinearPredictor().fit(mine, world=1)
        for name in ("a", "c", "b"):
            assert getattr(together, name)[rank] == getattr(alone, name)[0]


finite = st.one_of(st.just(0.0), st.floats(1e-9, 1e9))


@st.composite
def any_feedback(draw: st.DrawFn) -> Feedback:
    """Anything that ranks could report, zeros, constants and nonsense included; two ranks."""
    steps = draw(st.integers(1, 12))
    shape = (2 * steps,)
    samples = draw(arrays(np.int64, shape, elements=st.integers(0, 50)))
    load, compute_s, longest = (
        draw(arrays(np.float64, shape, elements=finite, fill=finite)) for _ in range(3)
    )
    step, rank = np.repeat(np.arange(steps), 2), np.tile(np.arange(2), steps)
    return Feedback(step, rank, samples, load, compute_s, load * longest, longest)


@given(any_feedback(), st.sampled_from(["sum", "padded", "auto"]))
def test_models_are_finite_and_positive_whatever_comes(rows: Feedback, cost: str) -> None:
    models = LinearPredictor(cost=cost).fit(rows, world=2)
    assert np.isfinite([models.a, models.c, models.b]).all()
    assert (models.a > 0).all()
    assert (models.c >= 0).all()
    assert (models.b >= 0).all()
    if cost == "sum":
        assert models.known == all(len(rows.of(rank)) for rank in range(2))


@pytest.mark.parametrize(
    "load",
    [
        [3.3954697e07, 1.0],
        [1.0, 3.3954697e07, 1.0, 1.0],
        [1e-170, 1e-170, 1.0],
        [1.79505112e08, *[1.0] * 8],
    ],
)
def test_what_floats_cannot_tell_apart_is_finite(load: list[float]) -> None:
    models = LinearPredictor().fit(feedback(load, [1.0] * len(load)), world=1)
    assert np.isfinite([models.a, models.c, models.b]).all()
    assert models.a[0] > 0


@given(st.integers(0, 10_000), st.sampled_from(COSTS), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))
def test_units_do_not_matter(seed: int, cost: Cost, seconds: float, sizes: float) -> None:
    rows = cluster(0.02, cost, steps=30, seed=seed).feedback(0, 30)
    other = replace(
        rows,
        compute_s=rows.compute_s * seconds,
        load=rows.load * sizes,
        squares=rows.squares * sizes**2,
        longest=rows.longest * sizes,
    )
    before = LinearPredictor(cost="auto").fit(rows, world=8)
    after = LinearPredictor(cost="auto").fit(other, world=8)
    assert after.cost.padded == before.cost.padded
    assert after.cost.kappa == pytest.approx(before.cost.kappa / sizes)
    assert after.a == pytest.approx(before.a * seconds / sizes)
    assert after.c == pytest.approx(before.c * seconds, abs=1e-9 * seconds)
    assert after.b == pytest.approx(before.b * seconds, abs=1e-9 * seconds)
