"""Who is slow, and why: by hand, from scripted scenarios, over REST."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_backend.insight.attribution import Rows, attribute, words, worker_words
from paceline_backend.insight.attribution.model import Model
from paceline_backend.insight.attribution.split import _lateness

WORLD, STEPS = 6, 100


def made(
    world: int = WORLD,
    steps: int = STEPS,
    *,
    noise: float = 0.0,
    load: Any = 40.0,
    speed: Any = 1.0,
    data_s: Any = 0.001,
    samples: Any = 4.0,
) -> Rows:
    """Steps of 2 ms a size unit; what is given may be [W] or [K, W]."""
    shape = (steps, world)
    rng = np.random.default_rng(world)
    loads = np.broadcast_to(np.asarray(load, float), shape)
    usual_s = 2e-3 * loads * np.asarray(speed, float)
    return Rows(
        step=np.arange(100, 100 + steps),
        samples=np.broadcast_to(np.asarray(samples, float), shape),
        load=loads,
        squares=loads**2 / 4,
        longest=loads / 4,
        data_s=np.broadcast_to(np.asarray(data_s, float), shape),
        compute_s=usual_s * (1 + noise * rng.standard_normal(shape)),
    )


def slow(rank: int, factor: float, world: int = WORLD) -> np.ndarray:
    return np.where(np.arange(world) == rank, factor, 1.0)


def in_steps(first: int, last: int, rank: int, factor: float) -> np.ndarray:
    """Speeds of which one is lower in steps 100 + first … 100 + last."""
    speed = np.ones((STEPS, WORLD))
    speed[first : last + 1, rank] = factor
    return speed


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 7))
def test_parts_add_up_whatever_the_records(seed: int, steps: int, world: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (steps, world)
    samples = rng.integers(0, 4, shape).astype(float)
    load = samples * rng.uniform(0.1, 100, shape)
    lost = rng.random(shape) < 0.2
    values = [
        np.where(lost, np.nan, column)
        for column in (
            samples,
            load,
            load**2,
            load,
            rng.exponential(0.1, shape),
            rng.exponential(1.0, shape) * (samples > 0),
        )
    ]
    rows = Rows(np.arange(steps), *values)
    attribution = attribute(rows)
    ready = np.where(rows.took_part, rows.data_s + rows.compute_s, np.nan)
    ready = ready[rows.took_part.sum(axis=1) >= 2]
    assert len(attribution.step) == len(ready)
    assert np.allclose(attribution.sp_s, np.nanmax(ready, axis=1) - np.nanmin(ready, axis=1))
    assert np.allclose(sum(attribution.parts.values()), attribution.sp_s)
    assert all((part >= 0).all() for part in attribution.parts.values())
    if len(ready):
        assert sum(attribution.shares.values()) == pytest.approx(1)
        assert sum(worker.caused for worker in attribution.workers) == pytest.approx(1)
    for worker in attribution.workers:
        assert worker.data + worker.node + worker.transient + worker.input == pytest.approx(
            worker.caused
        )
        assert worker.hidden >= 0
    assert words(attribution)
    assert all(worker_words(worker) for worker in attribution.workers)


def test_lateness_is_the_mean_over_all_orders_of_causes() -> None:
    rng = np.random.default_rng(0)
    typical, own, own_equal, rest = rng.uniform(0.5, 2, (4, 1, 1))
    equal = np.array([[1.1]])
    model = Model(typical, equal, own, own_equal, rest, np.array([[True]]), np.ones(1), 0.01)
    rows = made(1, 1)

    def time(on: set[str]) -> float:
        by_speed = {(False, False): equal, (True, False): typical}
        by_speed |= {(False, True): own_equal, (True, True): own}
        base = float(by_speed["data" in on, "node" in on][0, 0])
        return base * (float(rest[0, 0]) if "passing" in on else 1.0)

    causes = ("data", "node", "passing")
    shapley = dict.fromkeys(causes, 0.0)
    for order in itertools.permutations(causes):
        for at, cause in enumerate(order):
            before = set(order[:at])
            shapley[cause] += (time(before | {cause}) - time(before)) / 6
    lateness = _lateness(rows, np.array([[True]]), model)[:, 0, 0]
    assert lateness == pytest.approx([*shapley.values(), 0, 0])


def test_waiting_is_caused_by_who_still_computes() -> None:
    # 1 s, 2 s, 4 s: rank 0 waits a second for both others, then both wait 2 s for rank 2.
    attribution = attribute(made(3, 1, speed=[12.5, 25, 50], data_s=0))
    assert [worker.caused for worker in attribution.workers] == pytest.approx([0, 0.5 / 5, 4.5 / 5])
    assert attribution.waste == pytest.approx(5 / 12)
    assert (attribution.se, attribution.sp_s[0]) == (pytest.approx(9 / 7), pytest.approx(3))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_slow_node(noise: float) -> None:
    attribution = attribute(made(noise=noise, speed=slow(3, 2.0)))
    assert (attribution.cause, attribution.ranks) == ("node", [3])
    assert attribution.shares["node"] > 0.9
    assert attribution.workers[3].factor == pytest.approx(2.0, rel=0.03)
    assert attribution.workers[3].caused > 0.9
    assert [worker.cause for worker in attribution.workers].count("none") == WORLD - 1
    assert words(attribution).startswith("Rank 3 computes 2× slower than the median at equal load")


def test_a_node_with_its_own_overhead() -> None:
    rng = np.random.default_rng(1)
    load = rng.uniform(30, 50, (STEPS, WORLD))
    rows = made(load=load)
    rows.compute_s[:, 4] += 0.08
    attribution = attribute(rows)
    assert (attribution.cause, attribution.ranks) == ("node", [4])
    assert attribution.workers[4].factor == pytest.approx(2.0, rel=0.03)
    assert attribution.shares["transient"] < 0.01


def test_faster_node() -> None:
    attribution = attribute(made(speed=slow(2, 0.5)))
    assert (attribution.cause, attribution.ranks) == ("node", [])
    assert words(attribution) == "Rank 2 is faster than the others and waits: 100 % of the SP."
    assert worker_words(attribution.workers[2]) == "Rank 2 computes 2× faster than the median."


def test_half_slow_and_two_ranks() -> None:
    assert attribute(made(4, speed=[1, 2, 1, 2])).ranks == [1, 3]
    assert attribute(made(2, speed=[2, 1])).ranks == [0]


@pytest.mark.parametrize("kind", ["sum", "padded", "quadratic"])
def test_large_samples(kind: str) -> None:
    rng = np.random.default_rng(2)
    sizes = rng.lognormal(3, 0.8, (STEPS, WORLD, 8))
    load, squares, longest = sizes.sum(-1), (sizes**2).sum(-1), sizes.max(-1)
    cost = {"sum": load, "padded": 8 * longest, "quadratic": load + 0.05 * squares}[kind]
    compute_s = 1e-3 * cost * (1 + 0.02 * rng.standard_normal(cost.shape))
    eight, none = np.full(cost.shape, 8.0), np.zeros(cost.shape)
    attribution = attribute(Rows(np.arange(STEPS), eight, load, squares, longest, none, compute_s))
    assert (attribution.cause, attribution.ranks) == ("data", [])
    assert attribution.shares["data"] > 0.9
    assert attribution.noise < 0.03
    assert words(attribution).startswith("Batches differ in size: balancing by size would remove 9")


def test_one_rank_always_gets_the_large_samples() -> None:
    attribution = attribute(made(load=40 * slow(1, 1.5)))
    assert (attribution.cause, attribution.ranks) == ("data", [1])
    assert "The largest go to rank 1." in words(attribution)


def test_uneven_counts_of_equal_ranks() -> None:
    attribution = attribute(made(load=[40, 40, 40, 40, 40, 20], samples=[4, 4, 4, 4, 4, 2]))
    assert attribution.cause == "data"
    assert words(attribution).startswith(
        "Ranks that are equally fast get different numbers of samples"
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_passing_slowdown(noise: float) -> None:
    attribution = attribute(made(noise=noise, speed=in_steps(20, 49, 2, 4.0)))
    assert (attribution.cause, attribution.ranks) == ("transient", [2])
    assert attribution.workers[2].slow_steps == [(120, 149)]
    assert attribution.workers[2].slow_factor == pytest.approx(4.0, rel=0.04)
    assert "× slower in steps 120–149 only, and is fine since. It causes" in words(attribution)
    assert (
        attribution.parts["transient"][20:50].mean()
        > 10 * attribution.parts["transient"][50:].mean()
    )


def test_a_slight_slowdown_shows_by_lasting() -> None:
    attribution = attribute(made(noise=0.05, speed=in_steps(20, 49, 2, 1.2)))
    assert (attribution.cause, attribution.ranks) == ("transient", [2])
    ((first, last),) = attribution.workers[2].slow_steps
    assert abs(first - 120) <= 8
    assert abs(last - 149) <= 8


def test_slowdown_that_goes_on() -> None:
    attribution = attribute(made(noise=0.02, speed=in_steps(70, 99, 2, 3.0)))
    assert (attribution.cause, attribution.ranks) == ("transient", [2])
    assert "Rank 2 is 3× slower since step 170." in words(attribution)


def test_random_delays_of_all_ranks_are_no_noise() -> None:
    rng = np.random.default_rng(3)
    attribution = attribute(made(speed=rng.uniform(0.5, 1.5, (STEPS, WORLD))))
    assert attribution.cause == "transient"
    assert len(attribution.ranks) == WORLD
    assert "Something else uses their machines" in words(attribution)


def test_every_rank_slow_a_few_times_and_none_of_them_guilty() -> None:
    speed = np.ones((100, 64))
    for rank in range(64):
        speed[np.random.default_rng(rank).choice(100, 3, replace=False), rank] = 1.25
    attribution = attribute(made(64, speed=speed, noise=0.01))
    assert (attribution.cause, attribution.ranks) == ("transient", [])
    assert words(attribution).startswith("64 of 64 ranks are slow in passing, in turn: ")


def test_ranks_that_all_differ_a_little() -> None:
    attribution = attribute(made(64, speed=np.linspace(0.97, 1.03, 64)))
    assert (attribution.cause, attribution.ranks) == ("node", [])
    said = words(attribution)
    assert said.startswith("Ranks differ in speed by 6 %: rank 63 is the slowest, rank 0 the")


def test_slow_input() -> None:
    attribution = attribute(made(noise=0.03, data_s=0.001 + 0.08 * (slow(1, 2.0) - 1)))
    assert (attribution.cause, attribution.ranks) == ("input", [1])
    assert words(attribution).startswith("Rank 1 waits 80 ms a step for its data loader. It causes")


@pytest.mark.parametrize(("world", "noise"), [(2, 0.05), (16, 0.05), (6, 0.0)])
def test_no_straggler(world: int, noise: float) -> None:
    attribution = attribute(made(world, noise=noise))
    assert (attribution.cause, attribution.ranks) == ("none", [])
    assert {worker.cause for worker in attribution.workers} == {"none"}
    assert words(attribution).startswith("No straggler now: SE ")


def test_what_balancing_hides_stays_visible() -> None:
    cut = slow(3, 0.5)
    rows = made(noise=0.02, load=40 * cut, samples=4 * cut, speed=slow(3, 2.0))
    attribution = attribute(rows)
    assert (attribution.cause, attribution.workers[3].cause) == ("none", "node")
    assert attribution.workers[3].hidden == pytest.approx(2 * 2e-3 * (40 * 5.5 / 6 - 20), rel=0.1)
    assert max(worker.hidden for worker in attribution.workers[:3]) == 0
    assert "No straggler now" in words(attribution)
    assert "Rank 3 computes 2× slower than the median at equal load: a slow machine, whose" in (
        words(attribution)
    )


def test_balance_too_coarse_for_few_samples_is_due_to_the_node() -> None:
    counts = np.array([5, 4, 4, 4, 4, 3])
    attribution = attribute(made(load=10 * counts, samples=counts, speed=slow(5, 1.3)))
    assert (attribution.cause, attribution.ranks) == ("node", [5])


def test_mixed_causes_are_all_told() -> None:
    speed = in_steps(20, 29, 2, 2.0) * slow(4, 3.0)
    attribution = attribute(made(noise=0.02, speed=speed, data_s=0.02 * (slow(0, 2.0) - 1)))
    assert (attribution.cause, attribution.ranks) == ("node", [4])
    assert [attribution.workers[rank].cause for rank in (0, 2, 4)] == ["input", "transient", "node"]
    text = words(attribution)
    assert text.index("Rank 4 computes 3×") < text.index("Rank 0 waits 20 ms")
    assert "Rank 2 was 2× slower in steps 120–129 only" in text


def test_few_steps() -> None:
    three = attribute(made(steps=3, speed=slow(3, 2.0)))
    assert three.cause == "none"
    assert "3 steps with at least two ranks are too few to tell" in words(three)
    assert attribute(made(steps=4, speed=slow(3, 2.0))).ranks == [3]


def test_ranks_without_samples_and_lost_records() -> None:
    rows = made(noise=0.02, speed=slow(3, 2.0))
    samples = np.where(np.arange(WORLD) == 1, 0.0, rows.samples)
    compute_s = np.where(np.arange(WORLD) == 1, 0.0, rows.compute_s)
    compute_s[::7, 3] = np.nan
    attribution = attribute(dataclasses.replace(rows, samples=samples, compute_s=compute_s))
    assert (attribution.cause, attribution.ranks) == ("node", [3])
    idle = attribution.workers[1]
    assert (idle.factor, idle.caused, idle.cause) == (None, 0.0, "none")
    assert worker_words(idle) == "Rank 1 had samples in too few steps to tell its speed."
    assert not len(attribute(made(1)).step), "one rank alone waits for nobody"


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="load"):
        dataclasses.replace(made(), load=np.ones((STEPS, WORLD + 1)))
    with pytest.raises(ValueError, match="step"):
        dataclasses.replace(made(), step=np.arange(3))
