"""Plans of steps of a token budget: what steps hold, whom limits bind, which policies suit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import policies
from paceline.core.batch_limits.budget import counts_within
from paceline.core.emulation import Emulation
from paceline.planning.feedback import Window
from paceline.planning.history import History
from paceline.planning.offer import offer
from paceline.policies import Feedback, plan
from paceline.policies.base import Floats
from paceline.policies.presets import bsp
from paceline.policies.solve.order import epoch_order
from paceline.wire import Hello
from paceline_backend.simulator import Simulation
from paceline_backend.simulator.scenario import WorkerFailure, hello_of
from support.marks import some_long
from support.records import hello

WORLD, BUDGET = 4, 2_000.0
A_S = [1e-3, 1e-3, 1e-3, 3e-3]
PLAIN = [name for name in policies.names() if policies.make(name).changes == "nothing"]


def sizes() -> Floats:
    drawn = np.random.default_rng(0).lognormal(3.5, 0.8, 900)
    return np.asarray(np.clip(np.round(drawn), 1, 250))


def begun(**fields: Any) -> Hello:
    """Half of the longest sample is an eighth of the budget: speeds can be followed well."""
    packed = sizes().astype("<f8").tobytes()
    given = {"global_batch": 43, "sizes": packed, "epochs": 3, "seed": 3, "token_budget": BUDGET}
    return hello(WORLD, **(given | fields))


def due(epoch: int) -> list[list[int]]:
    """The sorted samples of each step."""
    order = epoch_order(900, 3, epoch)
    parts = np.split(order, np.cumsum(counts_within(sizes()[order], BUDGET))[:-1])
    return [sorted(part.tolist()) for part in parts]


def train(policy: policies.Policy, start: Hello) -> tuple[list[list[int]], Floats, Floats]:
    """Each step's sorted samples; loads and times of all steps and ranks, [S, W]."""
    run = Simulation(start, Emulation(a_s=A_S, b_s=[0.01] * WORLD), policy)
    steps, loads, times = [], [], []
    while not run.finished:
        ran = run.advance()
        flat = np.frombuffer(ran.plan.indices, "<u4")
        ends = np.cumsum([sum(row) for row in ran.plan.counts])[:-1]
        steps += [sorted(part.tolist()) for part in np.split(flat, ends)]
        loads.append(ran.features.load)
        times.append(ran.compute_s)
    return steps, np.concatenate(loads), np.concatenate(times)


@pytest.mark.parametrize("name", ["paceline", "lbb"])
def test_each_step_has_what_the_budget_holds_of_the_epochs_order(name: str) -> None:
    steps, loads, _ = train(policies.make(name), begun())
    assert steps == [step for epoch in range(3) for step in due(epoch)]
    assert loads.sum(axis=1).max() <= BUDGET


@pytest.mark.parametrize("name", some_long(["sata", "static-batching", "dynamic-batching"]))
def test_every_rank_works_in_long_steps_where_the_mean_step_is_smaller_than_the_world(
    name: str,
) -> None:
    """Two long samples fill a step; many steps have short ones, too."""
    values = np.where(np.arange(900) % 4, 900.0, 20.0)
    start = begun(sizes=values.astype("<f8").tobytes(), global_batch=3)
    run = Simulation(start, Emulation(a_s=A_S, b_s=[0.01] * WORLD), policies.make(name))
    counts: list[list[int]] = []
    while not run.finished:
        counts += run.advance().plan.counts
    made = np.array(counts)
    long = made[made.sum(axis=1) > WORLD + 2]
    assert len(long)
    assert ((long > 0).mean(axis=0) > 0.5).all()  # a slow rank may be too slow for some


def test_paceline_divides_each_step_by_speed() -> None:
    _, loads, times = train(policies.make("paceline"), begun())
    late = slice(len(loads) // 2, None)
    fluid_s = loads[late].sum(axis=1) / (1 / np.array(A_S)).sum() + 0.01
    assert times[late].max(axis=1).sum() <= 1.01 * fluid_s.sum()


def test_limits_bind_the_fast_and_the_rest_is_divided_by_speed() -> None:
    """Ranks 1 and 2 would take 0.3 of each step, and may take 0.26 and any part of it."""
    limits = [520.0, 2_000.0, 2_000.0, 2_000.0]
    steps, loads, times = train(policies.make("paceline"), begun(token_limits=limits))
    assert steps == [step for epoch in range(3) for step in due(epoch)]
    assert (loads <= limits).all()
    late = slice(len(loads) // 2, None)
    full = loads[late].sum(axis=1) > 0.95 * BUDGET
    assert loads[late][full, 0].min() > 0.97 * limits[0]
    others = times[late][full, 1:]
    assert (others.max(axis=1) / others.mean(axis=1)).mean() < 1.02
    _, equal, _ = train(policies.make("bsp"), begun(token_limits=limits))
    assert (equal <= limits).all()


def test_the_rest_of_an_epoch_is_planned_alike_after_a_takeover() -> None:
    """Another controller knows what is used, but not which order its predecessor composed."""
    used = np.concatenate([np.array(step) for step in due(1)[:5]])
    history = History(begun(epoch=1, step=5, used=np.sort(used).astype("<u4").tobytes()))
    problem = history.problem(3, 0, shuffle=True)
    assert problem.batch_sizes() == [len(step) for step in due(1)[5:8]]
    made, _ = plan(bsp.make(bsp.BspParameters()), problem, Feedback.empty(), shuffle=True)
    given = [sorted(np.concatenate(step).tolist()) for step in made.assignment.parts]
    assert given == due(1)[5:8]
    assert not made.epoch_end
    used = np.concatenate([np.array(step) for step in due(1)[:-2]])
    late = begun(epoch=1, step=5, used=np.sort(used).astype("<u4").tobytes())
    last = History(late).problem(9, 0, shuffle=True)
    assert last.batch_sizes() == [len(step) for step in due(1)[-2:]]
    assert last.reaches_epoch_end


@pytest.mark.parametrize("name", policies.names())
def test_policies_that_change_the_training_are_refused_by_name(name: str) -> None:
    policy = policies.make(name)
    said = policies.unsuited(policy, BUDGET)
    assert policies.unsuited(policy, None) is None
    if name in PLAIN:
        assert said is None
        return
    assert said is not None
    assert said.startswith(name)
    problem = History(begun()).problem(2, 0, shuffle=True)
    with pytest.raises(ValueError, match="cannot keep a token budget"):
        plan(policy, problem, Feedback.empty(), shuffle=True)


def test_a_policy_that_keeps_no_budget_is_refused_before_the_samples_are_gone_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def problem(self: History, steps: int, version: int, *, shuffle: bool) -> None:
        raise AssertionError("a problem was made")

    monkeypatch.setattr(History, "problem", problem)
    with pytest.raises(ValueError, match="cannot keep a token budget"):
        offer(History(begun()), Window(WORLD, 0), policies.make("chronica"), 0)


def test_a_restart_keeps_the_limits_of_the_ranks_that_are_left() -> None:
    limits = [2_000.0, 1_000.0, 1_500.0, 1_800.0]
    devices = Emulation(a_s=A_S, b_s=[0.01] * WORLD)
    died = [WorkerFailure(rank=1, step=5, world=3)]
    run = Simulation(begun(token_limits=limits), devices, policies.make("bsp"))
    run.failures.extend(died)
    while not run.finished:
        run.advance()
    assert run.hello.token_limits == [2_000.0, 1_500.0, 1_800.0]


def test_free_mode_is_refused() -> None:
    free = policies.make("paceline", {"mode": "free"})
    assert "paceline composes batches itself" in (policies.unsuited(free, BUDGET) or "")


def test_an_epochs_tiny_last_step_spoils_no_plan() -> None:
    """Lognormal lengths and 32 equal ranks, whose speeds are known by then."""
    drawn = np.random.default_rng(7).lognormal(np.log(400), 1.0, 400_000)
    whole = np.clip(np.round(drawn), 1, 8_192)
    whole[0] = 8_192
    budget, world = 32 * 16_384.0, 32
    lengths = whole[: int(np.searchsorted(np.cumsum(whole), 32 * budget))]
    begins = hello_of(
        lengths, world, len(lengths) // 32, epochs=3, loss_mean="size", token_budget=budget
    )
    devices = Emulation(a_s=[1e-5] * world, b_s=[0.02 * 1e-5 * 16_384] * world)
    run = Simulation(begins, devices, policies.make("paceline"))
    loads = []
    while not run.finished:
        if (trained := run.advance()).plan.epoch > 0:
            loads.append(trained.features.load)
    load = np.concatenate(loads)
    full = load.sum(axis=1) > 0.9 * budget
    assert (load[full].max(axis=1) < 1.02 * load[full].mean(axis=1)).all()
