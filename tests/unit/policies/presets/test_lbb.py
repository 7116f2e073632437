"""LBB: its models, its three tunings, workers that are left out, and the paper's tables."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from paceline import policies
from paceline.core.emulation import Emulation, Slowdown
from paceline.policies.base import Feedback, Floats, Models
from paceline.policies.presets.lbb import Cubic, LbbAllocator, Line, fit_profile, powers
from support.cluster import Cluster
from support.simulated import feedback_of, simulate

# Table 2, ms: four GPUs, ResNet-18, B = 512; and the lines through its two points of each.
EQUAL_S = np.array([81.81, 81.49, 85.39, 392.92]) / 1e3
BALANCED = np.array([167, 167, 158, 20])
BALANCED_S = np.array([104.94, 104.14, 103.46, 104.41]) / 1e3
SLOPE = (BALANCED_S - EQUAL_S) / (BALANCED - 128)
FIXED = EQUAL_S - SLOPE * 128
PROFILES = [
    [(2**p, float(slope * 2**p + fixed)) for p in range(1, 9)]
    for slope, fixed in zip(SLOPE, FIXED, strict=True)
]


class Loop:
    """An allocator, called as for one segment after the other, on devices that are lines."""

    def __init__(self, allocator: LbbAllocator, line: Line, batch: int, **fields: Any) -> None:
        world = len(line.slope)
        self.training = Cluster(np.ones(batch), np.ones(world), np.zeros(world), batch)
        self.allocator, self.line, self.fields = allocator, line, fields
        self.memory: dict[str, Any] = {}
        self.models = replace(Models.unknown(world), b=line.fixed)
        self.counts = self.call(Feedback.empty())

    def call(self, feedback: Feedback) -> list[int]:
        problem = self.training.problem(1, shuffle=False)
        problem = replace(problem, memory=self.memory, **self.fields)
        made = self.allocator.allocate(problem, self.models, feedback)
        self.memory, self.counts = dict(made.memory), made.counts.tolist()
        assert sum(self.counts) == problem.global_batch
        return self.counts

    def run(self, steps: int = 1) -> list[int]:
        """Trains steps with the counts in force, and gives those of the next."""
        first = self.training.step
        self.training.step += steps
        times = self.line(np.array(self.counts))
        return self.call(feedback_of([times] * steps, self.counts, first))


def line(*slope: float, fixed: float = 0.0) -> Line:
    return Line(np.array(slope), np.full(len(slope), fixed))


def effect(times: Floats) -> float:
    return float((times.max() - times.min()) / times.mean())


@pytest.mark.parametrize("one_size", [True, False])
def test_measured_times_decide_where_samples_have_one_size(one_size: bool) -> None:
    """Rank 0 was measured to be three times as fast; the models say the reverse."""
    loop = Loop(LbbAllocator(), line(1.0, 3.0), 100)
    loop.models = Models(np.array([3.0, 1.0]), np.zeros(2), np.zeros(2))
    if not one_size:
        loop.training.sizes = np.resize([0.5, 1.5], 100)
    assert loop.run() == ([75, 25] if one_size else [25, 75])


def test_profiles_are_cubics() -> None:
    true = np.array([0.02, 1e-3, 2e-6, 5e-9])
    points = [(2**p, float(powers(2**p) @ true)) for p in range(1, 10)]
    assert powers(300) @ fit_profile(points) == pytest.approx(powers(300) @ true, rel=1e-6)


@given(
    st.lists(st.floats(1e-4, 10), min_size=1, max_size=10),
)
def test_a_profile_is_fitted_best_of_all_cubics_without_negative_terms(times: list[float]) -> None:
    """Of relative errors; against SciPy's solver, and for any times."""
    points = [(2 ** (k + 1), time_s) for k, time_s in enumerate(times)]
    samples, time_s = np.array(points).T
    fitted = fit_profile(points)
    assert (fitted >= 0).all()
    scale = powers(samples.max())
    columns = powers(samples) / scale / time_s[:, None]
    _, error = nnls(columns, np.ones(len(points)))
    mine = np.linalg.norm(columns @ (fitted * scale) - 1)
    assert mine == pytest.approx(error, rel=1e-6, abs=1e-9)


def test_a_profile_never_promises_that_more_samples_take_less() -> None:
    """The last point was a bit too fast: beyond it, a plain cubic turns down."""
    points = [(2**p, 1e-3 * 2**p) for p in range(1, 8)] + [(256, 0.2)]
    plain = np.polynomial.Polynomial.fit(*np.array(points).T, 3)
    assert plain(600) < plain(300)
    times = Cubic(np.tile(fit_profile(points), (1_000, 1)))(np.arange(1_000))
    assert (np.diff(times) >= 0).all()
    assert times[0] == 0


def test_tables_2_and_3_by_profile() -> None:
    """The paper: 166/166/160/20 from its profiles, 167/167/158/20 in the end."""
    loop = Loop(LbbAllocator(), Line(SLOPE, FIXED), 512, profiles=PROFILES)
    assert loop.counts == pytest.approx(BALANCED, abs=1)
    times = loop.line(np.array(loop.counts))
    assert effect(times) < 0.01
    assert times == pytest.approx(BALANCED_S, rel=0.02)


def test_tables_2_and_3_by_one_rapid_tuning() -> None:
    """From equal batches: SE = 1.94 falls below 0.1, with the profiles' a0 as start-up costs."""
    loop = Loop(LbbAllocator(), Line(SLOPE, FIXED), 512, profiles=PROFILES)
    loop.memory, loop.fields["follows_plan"] = {}, True
    loop.training.step = 1
    assert effect(EQUAL_S) > 1.9
    counts = loop.call(feedback_of([EQUAL_S], [128] * 4))
    assert counts == pytest.approx(BALANCED, abs=1)
    assert effect(loop.line(np.array(counts))) < 0.1


def test_solves_equation_3() -> None:
    """Against brute force: no other counts have a lower makespan, nor of those a higher minimum."""
    rng = np.random.default_rng(0)
    every = np.array([c for c in itertools.product(range(13), repeat=3) if sum(c) == 12])
    for _ in range(20):
        devices = Line(rng.uniform(0.1, 3, 3), rng.uniform(0, 2, 3))
        loop = Loop(LbbAllocator(rapid_threshold=0), devices, 12)
        counts = np.array(loop.run())
        times = np.array([devices(c) for c in every])
        best = times.max(axis=1).min()
        assert devices(counts).max() == pytest.approx(best)
        as_good = times[times.max(axis=1) <= best * (1 + 1e-9)]
        least = np.where(as_good > 0, as_good, np.inf).min(axis=1).max()
        active = devices(counts)[counts > 0]
        assert active.min() == pytest.approx(least) or effect(active) < 0.05


@pytest.mark.parametrize("step", [1, 2, 3])
def test_fine_tuning_moves_as_many_as_it_takes(step: int) -> None:
    """The paper's lines 12–13 would change the global batch where `step` is odd."""
    loop = Loop(LbbAllocator(step=step), line(1.0, 1.0, 1.2), 300)
    assert loop.run() == [100 + step, 100, 100 - step]
    assert loop.run() == [100 + step, 100 + step, 100 - 2 * step]


def test_fine_tuning_passes_over_ranks_without_room() -> None:
    limits = np.array([100, 300, 300])
    loop = Loop(LbbAllocator(), line(1.0, 1.0, 1.2), 300, limits=limits)
    assert loop.run() == [100, 101, 99]


def test_a_worker_left_out_is_tried_again() -> None:
    allocator = LbbAllocator(retry_steps=20, window_steps=2)
    slow, recovered = line(1.0, 1.0, 99.0), line(1.0, 1.0, 1.0)
    loop = Loop(allocator, slow, 12)
    assert loop.run() == [6, 6, 0]
    left = [loop.run() for _ in range(19)]
    assert left == [[6, 6, 0]] * 19
    assert loop.run() == [5, 6, 1]  # as slow as ever:
    assert loop.run()[2] == 0
    loop.line = recovered
    for _ in range(19):
        loop.run()
    assert loop.counts[2] == 0
    assert loop.run()[2] == 1
    for _ in range(6):
        loop.run()
    assert loop.counts == [4, 4, 4]


PROFILED = [[(n, n + 10.0) for n in (2, 4, 8, 16, 32, 64)]] * 2


def test_steps_before_the_first_plan_do_not_count() -> None:
    """The leader has divided them; they were slow on rank 0, as first steps can be."""
    loop = Loop(LbbAllocator(), line(1.0, 1.0, fixed=10.0), 64, profiles=PROFILED)
    loop.memory = {}
    loop.training.step = 3
    slow = feedback_of([np.array([400.0, 42.0])] * 3, [32, 32])
    assert loop.call(slow) == [32, 32]
    assert loop.run() == [32, 32]
    loop.memory, loop.fields["follows_plan"] = {}, True
    assert loop.call(slow)[0] < 10


def test_one_short_step_does_not_move_most_of_the_batch() -> None:
    """Its time is near a0, so that its samples seem to take no time."""
    loop = Loop(LbbAllocator(), line(1.0, 1.0, fixed=10.0), 64, profiles=PROFILED)
    given = []
    for short_s in (10.1, 9.9):
        loop.memory = {}
        loop.call(Feedback.empty())
        loop.training.step += 1
        step = loop.training.step - 1
        given.append(loop.call(feedback_of([np.array([42.0, short_s])], [32, 32], step)))
    assert given[0] == [15, 49], "half of the slope that the profile has"
    assert given[1] == pytest.approx(given[0], abs=1)


def test_an_epoch_s_last_step_does_not_count() -> None:
    loop = Loop(LbbAllocator(), line(1.0, 1.0), 64)
    loop.training.step += 1
    small = feedback_of([np.array([1.0, 9.0])], [15, 15])
    assert loop.call(small) == [32, 32]
    assert loop.run() == [32, 32]


def test_follows_disturbances() -> None:
    """Fig. 7: a GPU's steps take 50 ms longer for a while; SE rises, and falls within few steps."""
    slow = Slowdown(ranks=[2], factor=1.5, first_step=40, steps=60)
    devices = Emulation(a_s=SLOPE.tolist(), b_s=FIXED.tolist(), slowdowns=[slow], noise=0.01)
    ran = simulate(policies.make("lbb"), devices, np.ones(5_120), 512, 160, profiles=PROFILES)
    assert ran.effect(30, 40) < 0.1
    assert ran.effect(40, 43) > 0.3
    assert ran.effect(50, 100) < 0.1
    assert ran.effect(100, 103) > 0.3
    assert ran.effect(115, 160) < 0.1
