"""`paceline`: DDP's batches divided as well as can be, and batches made to divide well."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from paceline import policies
from paceline.core.cost import Cost, features
from paceline.core.emulation import Emulation
from paceline.policies import Feedback, Models, Problem, plan
from paceline.policies.base import Floats, Ints
from paceline.policies.planner import shares_of
from paceline.policies.presets.paceline import PacelineScheduler
from paceline.policies.solve.balance import partition
from paceline.wire import Hello
from paceline_backend.simulator import Simulation
from support.records import hello
from support.simulated import train

NO_LIMIT = 10**6


def slowest(sizes: Floats, models: Models, ranks: Ints) -> float:
    order = np.argsort(ranks, kind="stable")
    counts = np.bincount(ranks, minlength=models.world)
    return float(models.ett(features(sizes[order], counts)).max())


def best(sizes: Floats, models: Models, limits: Ints) -> float:
    """The least possible time, by an exact solver: x[i, j] whether j gets i, y[j] whether any."""
    n, world = len(sizes), models.world
    each = np.kron(np.eye(n), np.ones(world))
    on = [np.kron(np.ones(n), np.eye(world)[j]) for j in range(world)]
    cost = (models.a * sizes[:, None] + models.c).ravel()
    rows = [np.concatenate([row, np.zeros(world + 1)]) for row in each]
    low, high = [1.0] * n, [1.0] * n
    for j in range(world):
        used = np.eye(world)[j]
        rows.append(np.concatenate([on[j] * cost, models.b * used, [-1]]))
        rows.append(np.concatenate([on[j], -min(int(limits[j]), n) * used, [0]]))
        low += [-np.inf, -np.inf]
        high += [0.0, 0.0]
    columns = n * world + world + 1
    solved = milp(
        np.eye(columns)[-1],
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.append(np.ones(columns - 1), 0),
        bounds=Bounds(0, np.append(np.ones(columns - 1), np.inf)),
        options={"mip_rel_gap": 1e-7},
    )
    assert solved.status == 0
    return float(solved.fun)


def test_a_partition_is_as_good_as_the_best() -> None:
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(30):
        world = int(rng.integers(2, 4))
        n = int(rng.integers(world, 10))
        models = Models(
            rng.choice([1.0, 2.0, 3.0], world),
            rng.choice([0.0, 5.0], world),
            rng.choice([0.0, 20.0], world),
        )
        limits = rng.choice([3, NO_LIMIT], world)
        if limits.sum() < n:
            limits[:] = NO_LIMIT
        sizes = rng.gamma(2, 20, n)
        ranks = partition(sizes, models, limits=limits)
        assert (np.bincount(ranks, minlength=world) <= limits).all()
        ratios.append(slowest(sizes, models, ranks) / best(sizes, models, limits))
    assert max(ratios) <= 1.005
    assert np.mean(np.array(ratios) <= 1 + 1e-6) >= 0.95


def test_given_counts_are_kept_and_their_loads_levelled() -> None:
    sizes = np.random.default_rng(1).lognormal(3, 1, 64)
    counts = np.array([24, 16, 16, 8])
    models = Models(1 / counts, np.zeros(4), np.zeros(4))
    ranks = partition(sizes, models, counts)
    assert np.bincount(ranks).tolist() == counts.tolist()
    rate = np.bincount(ranks, sizes) / counts
    assert rate.max() <= 1.01 * sizes.mean()
    with pytest.raises(ValueError, match="sum is 64"):
        partition(sizes[1:], models, counts)


def problem(sizes: Floats, world: int, batch: int, steps: int = 10**6) -> Problem:
    n = len(sizes)
    return Problem(sizes, np.arange(n), np.arange(n), np.arange(n) % world, 0, 0, steps, batch,
                   world, seed=3)  # fmt: skip


def best_padded(sizes: Floats, models: Models) -> float:
    """The least possible time of padded batches, by trying all."""
    ranks = np.array(list(product(range(models.world), repeat=len(sizes))))
    time_s = np.zeros(len(ranks))
    for j in range(models.world):
        own = ranks == j
        n, longest = own.sum(axis=1), np.where(own, sizes, 0.0).max(axis=1)
        took = models.a[j] * n * longest + models.c[j] * n + models.b[j]
        time_s = np.maximum(time_s, np.where(n > 0, took, 0.0))
    return float(time_s.min())


def test_padded_batches_are_cut_as_well_as_can_be_on_any_workers() -> None:
    rng = np.random.default_rng(6)
    for _ in range(40):
        world = int(rng.integers(2, 5))
        models = Models(
            rng.choice([1.0, 1.5, 3.0], world),
            rng.choice([0.0, 5.0], world),
            np.full(world, 20.0),
            cost=Cost(padded=True),
        )
        sizes = rng.lognormal(3, 1, 7)
        assert slowest(sizes, models, partition(sizes, models)) <= 1.0002 * best_padded(
            sizes, models
        )


@pytest.mark.parametrize(("dif", "bound"), [(4.0, 1.04), (64.0, 1.08)])
def test_free_mode_composes_padded_batches_for_uneven_workers(dif: float, bound: float) -> None:
    world, batch = 8, 32
    sizes = np.random.default_rng(7).gamma((45 / dif) ** 2, dif**2 / 45, batch * 64)
    a = np.repeat([1e-3, 2e-3], world // 2)
    models = Models(a, np.zeros(world), np.zeros(world), cost=Cost(padded=True))
    scheduler = PacelineScheduler(free=True)
    work = problem(sizes, world, batch)
    order = scheduler.compose(work, models)
    assert np.array_equal(np.sort(order), work.remaining)
    made = scheduler.schedule(replace(work, order=order), models)
    step_s = models.ett(features(sizes[made.samples], made.counts)).max(axis=1)
    assert step_s.sum() <= bound * sizes.sum() / (1 / a).sum()


def training(sizes: Floats, world: int, batch: int) -> Hello:
    return hello(world, sizes=sizes.astype("<f8").tobytes(), global_batch=batch, epochs=2)


# With noise, speeds are learned to within some tenths of a per cent: equal workers feel that.
@pytest.mark.parametrize(
    ("slow", "noise", "bound"),
    [(1.0, 0.0, 1.005), (2.0, 0.02, 1.02)],
)
def test_free_mode_reaches_the_fluid_limit_with_learned_speeds(
    slow: float, noise: float, bound: float
) -> None:
    world, batch = 8, 32
    sizes = np.random.default_rng(4).gamma(0.5, 90, batch * 100)  # mean 45, DIF 64
    a = np.repeat([1e-3, 1e-3 * slow], world // 2)
    devices = Emulation(a_s=a.tolist(), b_s=[0.0] * world, noise=noise)
    policy = policies.make("paceline", {"mode": "free", "cost": "sum"})
    simulation = Simulation(training(sizes, world, batch), devices, policy)
    planned = fluid = 0.0
    while not simulation.finished:
        ran = simulation.advance()
        if ran.plan.epoch > 0:
            true = a * ran.features.load
            planned += float(true.max(axis=1).sum())
            fluid += float(ran.features.load.sum() / (1 / a).sum())
    assert planned / fluid <= bound


def test_steps_are_composed_anew_once_speeds_are_known() -> None:
    sizes = np.random.default_rng(5).gamma(0.5, 90, 32 * 60)
    devices = Emulation(a_s=[1e-3] * 4 + [2e-3] * 4, b_s=[0.0] * 8)
    free = policies.make("paceline", {"mode": "free", "cost": "sum"})
    simulation = Simulation(training(sizes, 8, 32), devices, free)
    shuffled = [simulation.advance().plan.shuffled for _ in range(8)]
    assert shuffled[0]
    assert sum(shuffled[1:]) == 1


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["exact", "free"])
def test_padding_is_noticed_and_steps_are_composed_for_it(mode: str, padded: bool) -> None:
    """While it is unknown, steps are composed as if batches were padded."""
    sizes = np.random.default_rng(8).gamma(0.5, 90, 32 * 60) + 1
    devices = Emulation(a_s=[1e-3] * 4 + [2e-3] * 4, b_s=[0.0] * 8, cost=Cost(padded=padded))
    simulation = Simulation(
        training(sizes, 8, 32), devices, policies.make("paceline", {"mode": mode})
    )
    composed = []
    for _ in range(16):
        if simulation.advance().plan.shuffled:
            composed.append(simulation.history._cost.padded)
    assert composed[0]
    assert (len(composed) > 1) is (mode == "free")
    assert composed[-1] is (padded or mode == "exact")
    models = simulation.policy.predictor.fit(simulation.window.feedback(), 8)
    assert models.cautious.cost.padded is padded


@pytest.mark.parametrize(("world", "local"), [(8, 4), (32, 4), (8, 16)])
def test_composed_steps_of_whole_numbers_come_out_even(world: int, local: int) -> None:
    """All workers get the same, but for what the epoch's total leaves over."""
    sizes = np.round(np.random.default_rng(0).normal(45, 4, 64 * world * local))
    work = problem(sizes, world, world * local)
    models = Models(np.ones(world), np.zeros(world), np.ones(world))
    scheduler = PacelineScheduler(free=True)
    made = scheduler.schedule(replace(work, order=scheduler.compose(work, models)), models)
    load = features(sizes[made.samples], made.counts).load
    assert (load.max(axis=1) - load.mean(axis=1)).sum() <= 2


def test_large_samples_share_steps_though_measured_speeds_differ_a_little() -> None:
    """Each was in a step of its own, which took as long as the sample."""
    world, batch = 8, 64
    sizes = np.minimum(np.random.default_rng(1).lognormal(5.5, 1.0, batch * 64), 2048)
    cost = Cost(kappa=1.2e-3)
    a = 1e-3 * np.linspace(1.0, 1.01, world)
    models = Models(a, np.zeros(world), np.zeros(world), cost=cost)
    scheduler = PacelineScheduler(free=True)
    work = problem(sizes, world, batch)
    made = scheduler.schedule(replace(work, order=scheduler.compose(work, models)), models)
    step_s = models.ett(features(sizes[made.samples], made.counts)).max(axis=1)
    assert step_s.sum() <= 1.001 * cost.sizes(sizes).sum() / (1 / a).sum()


def test_where_sizes_hardly_matter_shares_while_coasting_go_by_samples() -> None:
    """What is left of a speed per size is noise there."""
    models = Models(np.array([1e-9, 5e-9]), np.array([0.01, 0.03]), np.zeros(2))
    rows = np.arange(2)
    ones = np.ones(2)
    feedback = Feedback(
        **dict.fromkeys(Feedback.__dataclass_fields__, ones)
        | {"rank": rows, "step": rows * 0, "samples": ones.astype(np.int64)}
    )
    shares = shares_of(policies.make("paceline", {}), models, feedback)
    assert shares == pytest.approx([0.75, 0.25], rel=1e-4)


def test_workers_that_differ_at_other_loads_do_not_count_as_equal() -> None:
    models = Models(np.array([1.0, 0.5]), np.zeros(2), np.array([0.0, 3200.0]))
    sizes = np.repeat([150.0, 50.0], 128)  # at the mean share both take the same
    work = replace(problem(sizes, 2, 128, steps=2), order=np.arange(256))
    made = PacelineScheduler().schedule(work, models)
    taken = models.ett(features(sizes[made.samples], made.counts)).max(axis=1)
    for step, part in enumerate((sizes[:128], sizes[128:])):
        assert taken[step] <= slowest(part, models, partition(part, models))


def test_there_is_nothing_to_compose_where_the_last_step_is_dropped() -> None:
    work = replace(problem(np.ones(3), world=2, batch=4), drop_last=True)
    made, _ = plan(
        policies.make("paceline", {"mode": "free"}), work, Feedback.empty(), shuffle=True
    )
    assert made.assignment.counts.shape == (0, 2)


@pytest.mark.parametrize(("mode", "padded"), [("exact", True), ("free", False)])
def test_batches_are_balanced_after_four_steps(mode: str, padded: bool) -> None:
    """As well as if the cost had been given, to within a tenth."""
    rng = np.random.default_rng(3)
    sizes = 100 * rng.lognormal(0, 1, 64 * 100)
    devices = Emulation(
        a_s=[1e-4, 1e-4, 2e-4, 1e-4], b_s=[0.0] * 4, cost=Cost(padded=padded), noise=0.03
    )
    rates = []
    for cost in ("auto", "padded" if padded else "sum"):
        policy = policies.make("paceline", {"mode": mode, "cost": cost})
        simulation = Simulation(training(sizes, 4, 64), devices, policy, steps=16)
        ran = train(simulation)
        seconds = np.concatenate([part.step_s for part in ran])[4:]
        load = np.concatenate([part.features.load.sum(axis=1) for part in ran])[4:]
        rates.append(seconds.sum() / load.sum())
    assert rates[0] < 1.1 * rates[1]


@pytest.mark.parametrize(("mode", "sized"), [("exact", 0.1), ("free", 0.0)])
def test_no_harm_is_done_where_sizes_hardly_matter(mode: str, sized: float) -> None:
    """Neither while the cost is unknown, nor once many steps have shown it."""
    sizes = np.random.default_rng(9).lognormal(0, 1, 128 * 30)
    a = sized / float(sizes.mean()) / 16
    devices = Emulation(a_s=[a] * 8, b_s=[0.02] * 8, c_s=[(1 - sized) / 16] * 8, noise=0.05, seed=3)
    epochs = {}
    for name, parameters in (("bsp", {}), ("paceline", {"mode": mode})):
        policy = policies.make(name, parameters)
        ran = train(Simulation(training(sizes, 8, 128), devices, policy))
        epochs[name] = np.concatenate([part.step_s for part in ran]).reshape(2, 30).sum(axis=1)
    assert (epochs["paceline"] <= 1.03 * epochs["bsp"]).all()
