"""Profiles of simulated ranks, and LBB's straggler effect with them (its Table 2 and Fig. 7)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.policies.base import Floats
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.simulator.scenario import Change

SCENARIOS = Path(__file__).parents[3] / "examples" / "scenarios"


def scenario(name: str, **changes: Any) -> Scenario:
    of = Scenario.load(SCENARIOS / f"{name}.yaml")
    return msgspec.structs.replace(of, **{"profile": None} | changes)


def trained(of: Scenario) -> tuple[Floats, Floats]:
    """The samples, [S, W], and the straggler effect of each step, [S]."""
    simulation, samples, times = Simulation.of(of), [], []
    while not simulation.finished:
        ran = simulation.advance()
        samples.append(ran.features.samples)
        times.append(ran.compute_s)
    time_s = np.concatenate(times)
    return np.concatenate(samples), np.ptp(time_s, axis=1) / time_s.mean(axis=1)


@pytest.mark.parametrize(
    ("policy", "parameters", "profiled"),
    [("lbb", {}, True), ("lbb", {"profile": "off"}, False), ("bsp", {}, False)],
)
def test_runs_that_begin_under_lbb_are_profiled(
    policy: str, parameters: dict[str, Any], profiled: bool
) -> None:
    of = scenario("lbb-table2", policy=policy, parameters=parameters)
    assert bool(of.hello().profiles) is profiled
    assert msgspec.structs.replace(of, profile=True).hello().profiles
    assert not msgspec.structs.replace(of, profile=False).hello().profiles


def test_profiles_are_noisy_and_end_at_two_equal_shares() -> None:
    of = scenario("lbb-table2", policy="lbb")
    of = msgspec.structs.replace(of, limits=[512, 100, 512, 512])
    assert of.devices.noise > 0
    first, second, *_ = of.hello().profiles
    assert [n for n, _ in first] == [2, 4, 8, 16, 32, 64, 128, 256]
    assert [n for n, _ in second] == [2, 4, 8, 16, 32, 64, 100]
    devices = of.emulation()
    errors = [s / (devices.a_s[0] * n + devices.b_s[0]) - 1 for n, s in first]
    assert 0 < np.abs(errors).max() < 3 * of.devices.noise
    assert msgspec.structs.replace(of, limits=[0, 512, 512, 512]).hello().profiles == []


def test_table_2_from_the_first_step() -> None:
    samples, effect = trained(scenario("lbb-table2", policy="lbb", epochs=None, steps=90))
    assert samples[0] == pytest.approx([167, 167, 158, 20], abs=2), "times have 1 % noise"
    assert effect.max() < 0.1


def test_table_2_after_one_rapid_tuning() -> None:
    """From equal batches of 128: with the profile's a0, one change of counts is enough."""
    begins = {"epochs": None, "steps": 90, "switches": [Change(16, "lbb")]}
    samples, effect = trained(scenario("lbb-table2", profile=True, **begins))
    changed = int(np.flatnonzero((np.diff(samples, axis=0) != 0).any(axis=1))[0]) + 1
    assert effect[:changed].min() > 1.5
    assert effect[changed:].max() < 0.1
    _, without = trained(scenario("lbb-table2", profile=False, **begins))
    assert (without[changed:] > 0.1).sum() > 20


def test_figure_7_after_each_rapid_tuning() -> None:
    of = scenario("lbb-disturbances", policy="lbb")
    samples, effect = trained(of)
    changes = np.abs(np.diff(samples, axis=0)).max(axis=1)
    for slow in of.devices.slowdowns:
        end = slow.first_step + (slow.steps or 0)
        for first in (slow.first_step, end):  # when it comes and when it goes
            rapid = first + int(np.flatnonzero(changes[first : first + 12] > 8)[0]) + 1
            assert effect[first] > 0.3
            assert rapid - first <= 6
            assert effect[rapid] < 0.1
