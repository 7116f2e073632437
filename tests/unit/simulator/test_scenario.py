"""Scenarios: what YAML gives, what is refused and how, and that the examples can be simulated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import yaml

from paceline_backend.simulator import Scenario, ScenarioError, Simulation
from paceline_backend.simulator.scenario import Communication, Group

EXAMPLES = Path(__file__).parents[3] / "examples" / "scenarios"
PLAIN: dict[str, Any] = {
    "name": "small",
    "workers": 4,
    "global_batch": 16,
    "epochs": 1,
    "sizes": {"distribution": "gamma", "mean": 45, "dif": 16, "samples": 200},
    "devices": {"unit_s": 1e-3},
}


def test_everything_reaches_devices_and_hello() -> None:
    """All of it in YAML, with numbers such as 1e-3 that YAML 1.1 alone takes for text."""
    scenario = Scenario.parse("""
        name: all
        workers: 3
        global_batch: 12
        epochs: 2
        steps: 10
        seed: 5
        drop_last: true
        loss_mean: size
        sizes: {distribution: constant, mean: 2, samples: 100}
        devices:
          unit_s: 1e-3
          step_s: [1e-2, 2e-2, 3e-2]
          sample_s: 1e-4
          data_s: 0.5
          factors: [1, {workers: 2, factor: 3}]
          cost: {kappa: 0.1, padded: true}
          slowdowns: [{ranks: [1], factor: 2, first_step: 3, steps: 4, every: 9, chance: 0.5}]
          delay_s: [0, 5E-2]
          noise: 0.1
          serial: 0.25
        limits: [4, 8, 100]
        profile: true
        """)
    devices = scenario.emulation()
    assert devices.a_s == pytest.approx([1e-3, 3e-3, 3e-3])
    assert devices.c_s == pytest.approx([1e-4, 3e-4, 3e-4])
    assert devices.b_s == [1e-2, 2e-2, 3e-2]
    assert devices.data_s == [0.5] * 3
    assert (devices.cost.kappa, devices.cost.padded) == (0.1, True)
    assert (devices.delay_s, devices.noise, devices.serial) == ((0, 0.05), 0.1, 0.25)
    assert devices.seed == 5
    assert devices.slowdowns[0].chance == 0.5
    hello = scenario.hello()
    assert (hello.world, hello.global_batch, hello.epochs, hello.seed) == (3, 12, 2, 5)
    assert (hello.drop_last, hello.loss_mean, hello.limits) == (True, "size", [4, 8, 100])
    # Trial batches up to the memory's limit and two shares of a step, with delays up to 50 ms and
    # noise: the padded load of n samples of size 2 is n · (2 + 0.1 · 4).
    assert [[n for n, _ in rank] for rank in hello.profiles] == [[2, 4], [2, 4, 8], [2, 4, 8]]
    least_s = 4 * 2.4 * 1e-3 + 4 * 1e-4 + 1e-2
    assert 0.7 * least_s < hello.profiles[0][1][1] < 1.3 * least_s + 0.05
    assert Scenario.of(scenario.as_dict()) == scenario


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"wrokers": 4}, "wrokers"),
        ({"workers": "four"}, "workers: Expected `int`"),
        ({"workers": 0}, "workers: 0; give a number from 1 to 10000"),
        ({"global_batch": 0}, "global_batch"),
        ({"epochs": None}, "steps: give the number of steps"),
        ({"seed": -1}, "seed"),
        ({"loss_mean": "median"}, "loss_mean"),
        ({"policy": "chronika"}, "did you mean 'chronica'"),
        ({"parameters": {"widnow": 3}}, "parameters.widnow"),
        ({"switches": [{"step": 3, "policy": "nix"}]}, "switches[0].policy"),
        (
            {"switches": [{"step": 3, "policy": "bsp"}, {"step": 2, "policy": "bsp"}]},
            "switches: give them in the order",
        ),
        ({"failures": [{"rank": 4, "step": 1}]}, "failures[0].rank: 4; ranks are 0 … 3"),
        (
            {"failures": [{"rank": 3, "step": 1, "world": 3}, {"rank": 3, "step": 2}]},
            "failures[1].rank: 3; ranks are 0 … 2",
        ),
        ({"failures": [{"rank": 0, "step": 2, "world": 5}]}, "failures[0].world: 5"),
        ({"limits": 3}, "limits: limits allow 12 samples in total"),
        (
            {"limits": [2, 2, 12, 2], "failures": [{"rank": 2, "step": 1, "world": 3}]},
            "failures[0].world: limits allow 6 samples in total; "
            "they must allow at least global_batch, 16",
        ),
        ({"failures": [{"rank": 0, "step": 13}]}, "failures[0].step: 13; the run ends before it"),
        ({"steps": 9, "switches": [{"step": 9, "policy": "bsp"}]}, "switches[0].step: 9; the run"),
        ({"limits": [8, 8]}, "limits: 2 values for 4 workers"),
        ({"communication": {"bytes": 1e6}}, "communication.bandwidth"),
        ({"devices": {"unit_s": -1}}, "devices.unit_s: -1"),
        ({"devices": {"unit_s": 1, "step_s": [0, math.nan, 0, 0]}}, "devices.step_s[1]: nan"),
        (
            {"devices": {"unit_s": 1, "factors": [1] * 6 + [{"workers": -2, "factor": 1}]}},
            "devices.factors[6].workers: -2",
        ),
        (
            {"devices": {"unit_s": 1, "factors": [{"workers": 10**15, "factor": 1}]}},
            "devices.factors: 1000000000000000 values for 4 workers",
        ),
        ({"devices": {"unit_s": [1, 2]}}, "devices.unit_s: 2 values for 4 workers"),
        ({"devices": {"unit_s": 1, "factors": [{"workers": 3, "factor": 1}]}}, "devices.factors"),
        ({"devices": {"unit_s": 1, "noise": 2}}, "devices.noise"),
        ({"devices": {"unit_s": 1, "slowdowns": [{"ranks": [9], "factor": 2}]}}, "slowdowns[0]"),
        ({"sizes": {}}, "sizes: give either distribution or file"),
        ({"sizes": {"distribution": "zipf", "samples": 3}}, "sizes.distribution"),
        ({"sizes": {"distribution": "gamma"}}, "sizes.samples"),
        ({"sizes": {"distribution": "gamma", "samples": 9, "min": 3, "max": 2}}, "sizes.min"),
        ({"sizes": {"distribution": "uniform", "samples": 9, "dif": 1}}, "sizes.dif"),
        ({"sizes": {"file": "sizes.bin"}}, "sizes.file"),
    ],
)
def test_refuses_naming_the_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ScenarioError) as refusal:
        Scenario.of({**PLAIN, **change})
    assert field in str(refusal.value)


@pytest.mark.parametrize("text", ["[1, 2]", "name: [", ""])
def test_refuses_what_is_no_mapping(text: str) -> None:
    with pytest.raises(ScenarioError, match=r"mapping|YAML"):
        Scenario.parse(text)


def test_an_epoch_without_a_step_is_refused() -> None:
    scenario = Scenario.of({**PLAIN, "drop_last": True, "global_batch": 201})
    with pytest.raises(ScenarioError, match="drop_last: 200 samples are fewer"):
        scenario.hello()


@pytest.mark.parametrize("distribution", ["uniform", "normal", "lognormal", "gamma"])
def test_distributions_have_their_mean_and_dif(distribution: str) -> None:
    sizes = {"distribution": distribution, "mean": 45, "dif": 16, "samples": 100_000}
    drawn = Scenario.of({**PLAIN, "sizes": sizes}).sizes
    values = drawn.draw(1)
    assert values.mean() == pytest.approx(45, rel=0.01)
    assert values.std(ddof=1) == pytest.approx(16, rel=0.02)
    assert values.min() > 0
    assert np.array_equal(values, drawn.draw(1))
    assert not np.array_equal(values, drawn.draw(2))
    cut = msgspec.structs.replace(drawn, min=40.0, max=50.0).draw(1)
    assert (cut.min(), cut.max()) == (40.0, 50.0)


def test_sizes_from_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("3\n4.5\n6\n")
    (tmp_path / "b.csv").write_text("name,frames\nx,3\ny,4.5\nz,6\n")
    np.save(tmp_path / "c.npy", np.array([3.0, 4.5, 6.0]))
    for sizes in ({"file": "a.txt"}, {"file": "b.csv", "column": "frames"}, {"file": "c.npy"}):
        path = tmp_path / "scenario.yaml"
        path.write_text(yaml.safe_dump({**PLAIN, "sizes": sizes}))
        assert Scenario.load(path).hello().sizes_array().tolist() == [3.0, 4.5, 6.0]


@pytest.mark.parametrize(
    ("name", "content", "what"),
    [
        ("a.txt", "3\nthree\n", "row 2: 'three'"),
        ("a.txt", "3\n-1\n", "row 2: -1; give numbers above 0"),
        ("b.csv", "x\n1\nmany\n", "row 2: 'many'"),
        ("c.csv", "y,x\n1,2\n3\n", "row 2: None"),
        ("d.csv", "x\n1\n" + "9" * 200_000, "field larger than field limit"),
        ("e.npy", "", "No data left in file"),
        ("a.txt", "", "above 0"),
        ("a.csv", "x,y\n1,2\n", "sizes.column"),
        ("b.txt", None, "No such file"),
    ],
)
def test_bad_files_of_sizes(tmp_path: Path, name: str, content: str | None, what: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    sizes = {"file": name, "column": "x" if name == "c.csv" else None}
    scenario = Scenario.of({**PLAIN, "sizes": sizes}).at(tmp_path)
    with pytest.raises(ScenarioError, match=f"sizes.file.*{what}"):
        scenario.hello()


def test_ring_all_reduce() -> None:
    """Four workers: six messages, one and a half times the bytes."""
    ring = Communication(latency_s=1e-3, bytes=1e6, bandwidth=1e8, fixed_s=0.5)
    assert ring.seconds(4) == pytest.approx(0.5 + 6e-3 + 1.5e-2)
    assert ring.seconds(1) == 0.5
    assert Communication(fixed_s=0.25).seconds(4) == 0.25


def test_groups_of_factors() -> None:
    factors = [Group(3, 2.0), 1.5]
    plain = {**PLAIN, "devices": {"unit_s": 1.0, "factors": msgspec.to_builtins(factors)}}
    assert Scenario.of(plain).emulation().a_s == [2.0, 2.0, 2.0, 1.5]


def test_chronica_takes_what_table_4_says() -> None:
    """An epoch of equal samples under plain data parallelism: 231 s."""
    scenario = Scenario.load(EXAMPLES / "chronica-homogeneous.yaml")
    sizes = msgspec.structs.replace(scenario.sizes, dif=0.0)
    simulation = Simulation.of(msgspec.structs.replace(scenario, sizes=sizes))
    while not simulation.finished:
        simulation.advance()
    assert simulation.now == pytest.approx(231, rel=0.005)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_examples_train(path: Path) -> None:
    scenario = Scenario.load(path)
    assert scenario.name == path.stem
    if len(scenario.hello().sizes) > 2**20:
        return  # too large to train in a test
    simulation = Simulation.of(scenario)
    while simulation.step < 3:
        assert (simulation.advance().step_s > 0).all()
