"""The virtual cluster: repeatable, true to its devices, and each sample once whatever happens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from paceline.core.cost import Features
from paceline.core.emulation import Emulation, Slowdown
from paceline.wire import StepBatch, encode, encode_steps
from paceline_backend import cli
from paceline_backend.simulator import Scenario, ScenarioError, Simulation, TrainedSegment, summary
from paceline_backend.simulator.broadcast import records
from paceline_backend.simulator.simulation import remaining
from support.records import record
from support.simulated import train


def scenario(**fields: Any) -> Scenario:
    plain = {
        "name": "small",
        "workers": 4,
        "global_batch": 16,
        "epochs": 2,
        "sizes": {"distribution": "lognormal", "mean": 45, "dif": 30, "samples": 500},
        "devices": {"unit_s": 1e-3, "step_s": 0.01, "noise": 0.05, "factors": [1, 1, 2, 3]},
        "policy": "chronica",
    }
    return Scenario.of({**plain, **fields})


def encoded(ran: Iterable[TrainedSegment]) -> list[bytes]:
    return [
        msgspec.msgpack.encode((r.plan, r.attempt, records(r, slice(0, len(r.step_s)), 0, 0.0)))
        for r in ran
    ]


EVENTFUL: dict[str, Any] = {
    "devices": {
        "unit_s": 1e-3,
        "noise": 0.05,
        "delay_s": [0, 0.01],
        "slowdowns": [{"ranks": [0, 1], "factor": 3, "chance": 0.2}],
    },
    "failures": [{"rank": 1, "step": 13}, {"rank": 0, "step": 40, "world": 3}],
    "switches": [{"step": 20, "policy": "bsp"}],
    "communication": {"latency_s": 1e-4, "bytes": 1e6, "bandwidth": 1e9},
}


def test_the_same_scenario_gives_the_same_bytes() -> None:
    first, second = (train(Simulation.of(scenario(**EVENTFUL))) for _ in range(2))
    assert encoded(first) == encoded(second)
    other = train(Simulation.of(scenario(**EVENTFUL, seed=1)))
    assert encoded(other) != encoded(first)


def test_each_sample_once_in_each_epoch_with_failures() -> None:
    """What was trained before a failure is not trained again, and the lost step's samples are."""
    simulation = Simulation.of(scenario(**EVENTFUL))
    uses = np.zeros((2, 500), int)
    step, attempts, now = 0, [], 0.0
    for ran in train(simulation):
        trained = len(ran.step_s)
        assert (ran.plan.first_step, ran.begins_at >= now) == (step, True)
        np.add.at(
            uses[ran.plan.epoch], ran.plan.assignment.samples[: ran.features.samples.sum()], 1
        )
        step, now = step + trained, ran.begins_at + float(ran.step_s.sum())
        attempts.append((ran.attempt, ran.compute_s.shape[1]))
    assert (uses == 1).all()
    assert sorted(set(attempts)) == [(0, 4), (1, 4), (2, 3)]
    assert (simulation.hello.attempt, simulation.hello.step, simulation.hello.world) == (2, 40, 3)
    assert simulation.hello.epoch == 1
    assert simulation.now == pytest.approx(now)


def test_devices_that_remain_keep_their_own() -> None:
    slow = [Slowdown([0, 2], 5.0), Slowdown([1], 2.0)]
    devices = Emulation([1, 2, 3, 4], [5, 6, 7, 8], data_s=[0, 0, 1, 0], slowdowns=slow)
    left = remaining(devices, [0, 2, 3])
    assert (left.a_s, left.b_s, left.data_s, left.c_s) == ([1, 3, 4], [5, 7, 8], [0, 1, 0], [])
    assert [s.ranks for s in left.slowdowns] == [[0, 1], []]
    assert left.factors(0).tolist() == [5.0, 5.0, 1.0]


def test_waits_and_times_are_of_one_clock() -> None:
    """All ranks of a step end together, after the slowest and the all-reduce."""
    simulation = Simulation.of(
        scenario(
            devices={"unit_s": 1e-3, "data_s": [0, 0.5, 0, 0]}, communication={"fixed_s": 0.25}
        )
    )
    first, second = simulation.advance(), simulation.advance()
    whole = first.data_s + first.compute_s + first.wait_s + first.communication_s
    assert whole == pytest.approx(np.repeat(first.step_s[:, None], 4, axis=1))
    slowest = (first.data_s + first.compute_s).max(axis=1) + 0.25
    assert first.step_s == pytest.approx(slowest)
    assert second.begins_at == pytest.approx(float(first.step_s.sum()))
    assert first.started_at[1] == pytest.approx(first.step_s[0])


def test_records_are_encoded_as_ranks_encode_theirs() -> None:
    batch = StepBatch([record(3, 0), record(3, 1, ett_s=None, loss=None, squares=2.5)])
    columns = {
        name: [getattr(row, name) for row in batch.records]
        for name in batch.records[0].__struct_fields__
    }
    assert encode_steps(columns, "r") == encode(batch, "r")


def test_fluid_limit() -> None:
    devices = Emulation(a_s=[1.0, 2.0], b_s=[0.5, 0.5])
    batch = Features(np.array([3, 1]), np.array([10.0, 5.0]), np.zeros(2), np.zeros(2))
    assert summary.fluid_s(devices, 0, batch) == pytest.approx(15 / 1.5 + 0.5)
    # A rank whose overhead alone is longer than the step takes no part.
    late = Emulation(a_s=[1.0, 2.0], b_s=[0.5, 99.0])
    assert summary.fluid_s(late, 0, batch) == pytest.approx(15.5)
    slowed = Emulation(a_s=[1.0, 2.0], b_s=[0.0, 0.0], slowdowns=[Slowdown([0], 2.0, steps=1)])
    assert summary.fluid_s(slowed, 0, batch) == pytest.approx(15.0)
    assert summary.fluid_s(slowed, 1, batch) == pytest.approx(10.0)
    per_sample = Emulation(a_s=[1.0, 1.0], b_s=[0.0, 0.0], c_s=[0.5, 0.5])
    assert summary.fluid_s(per_sample, 0, batch) == pytest.approx((15 + 2) / 2)


def test_nothing_is_faster_than_the_fluid_limit() -> None:
    calm = scenario(devices={"unit_s": 1e-3, "step_s": 0.01, "factors": [1, 1, 2, 3]})
    results = summary.compare(calm, ["bsp", "chronica"])
    assert results["bsp"].speedup == 1.0
    assert results["chronica"].speedup is not None
    assert results["chronica"].speedup > 1.5
    for result in results.values():
        assert result.steps == 64
        assert result.time_over_fluid is not None
        assert result.time_over_fluid >= 1.0
        assert result.step_time_s == pytest.approx(result.total_s / 64)
    limit = results["bsp"].time_over_fluid / results["chronica"].time_over_fluid  # type: ignore[operator]
    assert results["chronica"].speedup == pytest.approx(limit, rel=1e-6)


def simulate(*arguments: str) -> Any:
    app = typer.Typer()
    cli.register(app)
    return CliRunner().invoke(app, ["simulate", *arguments], catch_exceptions=False)


def test_the_command_tabulates(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps(scenario().as_dict()))
    answer = simulate(str(path), "--compare", "bsp,chronica", "--json")
    figures = json.loads(answer.stdout)
    assert answer.exit_code == 0
    assert (figures["scenario"], figures["workers"]) == ("small", 4)
    assert list(figures["presets"]) == ["bsp", "chronica"]
    assert figures["presets"]["chronica"]["steps"] == 64
    table = simulate(str(path), "--policy", "bsp").stdout
    assert "simulated workers" in table
    assert "bsp" in table
    assert "chronica" not in table


def test_the_command_says_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("name: x\nworkers: 3\n")
    with pytest.raises(Exception, match=r"small.yaml: .*global_batch"):
        simulate(str(path))
    path.write_text(json.dumps(scenario().as_dict()))
    with pytest.raises(Exception, match="no policy 'fast'"):
        simulate(str(path), "--policy", "fast")
    assert simulate(str(path), "--compare", "bsp", "--policy", "bsp").exit_code == 2
    for how in ([], ["--policy", "bsp"], ["--compare", "bsp,chronica"]):
        with pytest.raises(ScenarioError, match="--warmup: 64 steps leave nothing to measure"):
            simulate(str(path), "--warmup", "64", *how)
