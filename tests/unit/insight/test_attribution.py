"""What ranks wait for, by cause."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline_backend.insight.attribution import Rows, attribute
from paceline_backend.insight.attribution.attribute import _lateness
from paceline_backend.insight.attribution.model import SpeedModel

WORLD, STEPS = 6, 100


def made(
    world: int = WORLD, steps: int = STEPS, *, speed: Any = 1.0, data_s: float = 0.001
) -> Rows:
    """Steps of 40 size units, of which one takes 2 ms; speeds may be [W]."""
    loads = np.full((steps, world), 40.0)
    return Rows(
        step=np.arange(100, 100 + steps),
        samples=np.full_like(loads, 4.0),
        load=loads,
        squares=loads**2 / 4,
        longest=loads / 4,
        data_s=np.full_like(loads, data_s),
        compute_s=2e-3 * loads * np.asarray(speed, float),
    )


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


def test_lateness_is_the_mean_over_all_orders_of_causes() -> None:
    rng = np.random.default_rng(0)
    typical, own, own_equal, rest = rng.uniform(0.5, 2, (4, 1, 1))
    equal = np.array([[1.1]])
    model = SpeedModel(typical, equal, own, own_equal, rest, np.array([[True]]), np.ones(1), 0.01)
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


def test_a_slow_rank_has_the_waiting() -> None:
    attribution = attribute(made(speed=np.where(np.arange(WORLD) == 3, 2.0, 1.0)))
    assert attribution.shares["node"] > 0.9
    assert attribution.workers[3].factor == pytest.approx(2.0, rel=0.03)
    assert attribution.workers[3].caused > 0.9


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="load"):
        dataclasses.replace(made(), load=np.ones((STEPS, WORLD + 1)))
    with pytest.raises(ValueError, match="step"):
        dataclasses.replace(made(), step=np.arange(3))
