"""Regular pauses of a rank: what counts as one, and when the next one is foretold."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.core.emulation import Emulation, Slowdown
from paceline.policies import Feedback, Models
from paceline.policies.pauses import factors, noticed
from paceline_backend.simulator import Simulation
from support.records import hello

WORLD, RANK = 3, 1
MODELS = Models(np.ones(WORLD), np.zeros(WORLD), np.zeros(WORLD))


def feedback(
    slow: dict[int, float], first: int, end: int, empty: frozenset[int] = frozenset()
) -> Feedback:
    """Steps in [first, end); rank `RANK` takes `slow` times as long, or has no samples."""
    step, rank = np.divmod(np.arange(first * WORLD, end * WORLD), WORLD)
    load, time = np.full(len(step), 8.0), np.full(len(step), 8.0)
    of_rank = rank == RANK
    for at, factor in slow.items():
        time[of_rank & (step == at)] *= factor
    gone = of_rank & np.isin(step, list(empty))
    load[gone], time[gone] = 0.0, 0.0
    samples = np.where(gone, 0, 8)
    return Feedback(step, rank, samples, load, time, load, load / 8)


def remembered(
    slow: dict[int, float], end: int, empty: frozenset[int] = frozenset(), every: int = 1
) -> dict[str, Any]:
    """What is known after the steps before `end`, of which plans saw 64 at a time."""
    memory: dict[str, Any] = {}
    for now in range(3, end + 1, every):
        rows = feedback(slow, max(now - 64, 0), now, empty)
        memory = msgspec.json.decode(msgspec.json.encode(noticed(memory, rows, MODELS)))
    return memory


def foretold(memory: dict[str, Any], first: int, steps: int = 100) -> dict[int, float]:
    made = factors(memory, first, steps, WORLD)
    if made is None:
        return {}
    others = np.delete(made, RANK, axis=1)
    assert (others == 1).all()
    return {first + int(at): float(made[at, RANK]) for at in np.flatnonzero(made[:, RANK] > 1)}


def test_the_fourth_pause_is_foretold() -> None:
    slow = {10: 5.0, 47: 5.0, 84: 5.0}
    assert foretold(remembered(slow, 84), 84) == {}
    assert foretold(remembered(slow, 86), 86) == {121: 5.0}


@given(st.integers(8, 200), st.integers(1, 40), st.integers(1, 7))
def test_any_period_is_foretold_whatever_the_segments(period: int, first: int, every: int) -> None:
    at = [first, first + period, first + 2 * period]
    memory = remembered(dict.fromkeys(at, 4.0), at[-1] + 1 + 7, every=every)
    assert foretold(memory, at[-1] + 1, 300) == {at[-1] + period: 4.0}


def test_distances_may_differ_by_a_step() -> None:
    memory = remembered({10: 5.0, 47: 5.0, 85: 5.0}, 88)
    assert foretold(memory, 88) == {122: 5.0, 123: 5.0}


@pytest.mark.parametrize("steps", [(10, 47, 90), (10, 13, 16), (10, 11, 12, 47, 48, 49), (10, 47)])
def test_other_slow_steps_are_no_regular_pauses(steps: tuple[int, ...]) -> None:
    assert foretold(remembered(dict.fromkeys(steps, 5.0), 95), 95) == {}


def test_a_pause_that_does_not_come_ends_the_period() -> None:
    slow = {10: 5.0, 47: 5.0, 84: 5.0}
    assert foretold(remembered(slow, 120), 120) == {121: 5.0}
    assert foretold(remembered(slow, 125), 125) == {}


def test_a_pause_without_samples_counts_as_come_but_not_twice() -> None:
    slow = {10: 5.0, 47: 5.0, 84: 5.0}
    empty = frozenset({121, 158})
    assert foretold(remembered(slow, 130, empty), 130) == {158: 5.0}
    assert foretold(remembered(slow, 170, empty), 170) == {}


def test_a_rank_that_becomes_slower_has_no_pause() -> None:
    slow = dict.fromkeys(range(50, 64), 5.0)
    assert remembered(slow, 64)["ranks"] == {}


@pytest.mark.parametrize("preset", ["paceline", "bsp"])
def test_plans_foretell_a_pause(preset: str) -> None:
    """From the fourth one on. Presets that do not foretell go on as before."""
    devices = Emulation(
        a_s=[1e-2] * 4,
        b_s=[0.0] * 4,
        noise=0.02,
        slowdowns=[Slowdown(ranks=[2], factor=5.0, first_step=20, steps=1, every=37)],
    )
    sizes = np.random.default_rng(0).uniform(0.5, 1.5, 64 * 500)
    start = hello(world=4, global_batch=64, sizes=sizes.astype("<f8").tobytes(), epochs=None)
    run = Simulation(start, devices, policies.make(preset))
    loads, errors = [], []
    while run.step < 180:
        ran = run.advance()
        loads += ran.features.load[:, 2].tolist()
        ett_s = np.array(ran.plan.ett_s or np.full(ran.compute_s.shape, np.nan))
        errors += np.abs(np.log(ett_s / ran.compute_s))[:, 2].tolist()
    due = [20 + 37 * k for k in (3, 4)]
    usual = np.median(loads)
    if preset == "bsp":
        assert min(errors[step] for step in due) > 1
    else:
        assert max(errors[step] for step in due) < 0.1
        assert max(loads[step] for step in due) < 0.4 * usual
