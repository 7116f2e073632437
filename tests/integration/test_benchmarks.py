"""Benchmarks: their form, where peers are missing too, what they count, and a bound of theirs."""

from __future__ import annotations

import importlib
import json
import re
import wave
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from paceline.wire.synchronisation import Pairwise
from support import held_up
from support.ranks import Ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the programs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Threads that wait for each other take long on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *options: str,
) -> tuple[int, str]:
    """Exit status and standard output of a program."""
    monkeypatch.setattr("sys.argv", [f"{module.__name__}.py", *options])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code, capsys.readouterr().out


def keeps_conventions(code: int, said: str) -> dict[str, Any]:
    """One JSON object with checks that say whether they hold; the exit status says it of all."""
    whole: dict[str, Any] = json.loads(said)
    assert set(whole) == {"commit", "machine", "config", "results", "checks"}
    for check in whole["checks"]:
        assert set(check) == {"name", "value", "bound", "op", "ok"}
        holds = check["value"] <= check["bound"]
        assert check["ok"] == (holds if check["op"] == "<=" else not holds)
    assert code == (0 if all(check["ok"] for check in whole["checks"]) else 1)
    return whole


def test_balance_names_the_peers_that_are_missing(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    balance, peers = program("balance"), program("peers")
    monkeypatch.setattr(balance, "STEPS", 4)
    missing = peers.Peer("somebody's", "no-such-package", "MIT", peers.torch_sampler)
    monkeypatch.setattr(balance, "PEERS", (peers.PEERS[0], missing))
    whole = keeps_conventions(*run(balance, monkeypatch, capsys, "--quick", "--json"))
    rows = whole["results"]["settings"]
    assert {row["dif"] for row in rows} == {0, 16, 64}
    assert whole["config"]["peers"]["somebody's"]["version"] is None
    for row in rows:
        assert row["contenders"]["somebody's"] is None
        least = row["bound_over_limit"] or 1.0
        for name, figures in row["contenders"].items():
            assert figures is None or figures["over_limit"] >= least - 1e-9, name
    assert "not installed: somebody's" in balance.table_of(rows)


def test_torch_is_bsp(program: Any) -> None:
    """Called as its users do, and planned by Paceline: one order, one time."""
    balance, peers = program("balance"), program("peers")
    setting = balance.Setting(16, 4, 4, uneven=True, padded=False)
    sampler = balance.theirs(setting, peers.PEERS[0])
    assert sampler["over_limit"] == pytest.approx(balance.ours(setting, "bsp", {})["over_limit"])


def least_s(sizes: Any, steps: int, a_s: Any) -> float:
    """The best of all assignments of samples to steps and workers."""
    batch, best = len(sizes) // steps, np.inf
    load, count = np.zeros((steps, len(a_s))), [0] * steps

    def assign(sample: int) -> None:
        nonlocal best
        time_s = float((load * a_s).max(axis=1).sum())
        if time_s >= best or sample == len(sizes):
            best = min(best, time_s)
            return
        for step in range(steps):
            if count[step] < batch:
                count[step] += 1
                for rank in range(len(a_s)):
                    load[step, rank] += sizes[sample]
                    assign(sample + 1)
                    load[step, rank] -= sizes[sample]
                count[step] -= 1

    assign(0)
    return float(best)


@pytest.mark.parametrize("dif", [0, 4, 16])
@pytest.mark.parametrize(
    ("steps", "batch", "a_s"),
    [(1, 4, [1, 1, 2]), (2, 2, [1, 2]), (2, 3, [1, 2]), (2, 3, [1, 1]), (1, 5, [2, 2, 1])],
)
def test_nothing_is_faster_than_the_bound(
    program: Any, dif: int, steps: int, batch: int, a_s: list[float]
) -> None:
    bounds, a = program("bounds"), np.array(a_s, float)
    sizes = np.maximum(np.round(np.random.default_rng(dif).normal(45, dif, steps * batch)), 1)
    bound = bounds.indivisible_s(sizes, steps, a, 0.0)
    least = least_s(sizes, steps, a)
    assert bounds.fluid_s(sizes.sum(), steps, a, 0.0) <= bound <= least * (1 + 1e-9)
    if dif == 0:
        assert bound == pytest.approx(least)
    with pytest.raises(ValueError, match="a_s: more than two values"):
        bounds.indivisible_s(sizes, steps, np.array([1.0, 2.0, 3.0]), 0.0)


def test_papers_prints_each_figure_beside_ours(
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    papers = program("papers")
    for path in papers.SCENARIOS.glob("*.yaml"):  # the same testbeds with smaller data sets
        small = re.sub(r"samples: \d+", "samples: 4096", path.read_text())
        if path.name.startswith("chronica"):
            small = small.replace("samples: 4096", "samples: 640")
        (tmp_path / path.name).write_text(small)
    monkeypatch.setattr(papers, "SCENARIOS", tmp_path)
    few = {label: papers.SYSTEMS[label] for label in ("TensorFlow", "CHRONICA")}
    monkeypatch.setattr(papers, "SYSTEMS", few)
    whole = keeps_conventions(*run(papers, monkeypatch, capsys, "--quick", "--json"))
    results = whole["results"]
    even = results["chronica_table_4"][0]
    assert even["dif"] == 0
    assert even["ours_s"]["TensorFlow"] == pytest.approx(even["paper_s"]["TensorFlow"], rel=1e-3)
    fitted = results["chronica_table_5"][0]
    assert fitted["ours_s"] == pytest.approx(
        {label: fitted["paper_s"][label] for label in few}, rel=1e-6
    )
    equal = results["lbb_table_2"]["ours"]["SSGD"]
    assert equal["step_ms"] == pytest.approx(max(papers.LBB_SSGD_MS), rel=0.02)
    table = papers.table_of(results)
    assert "578 / " in table
    assert "paper 104.9 ms [167, 167, 158, 20]" in table


def record(path: Path, frequency: float, seconds: float) -> None:
    """Writes a tone as a telephone recording."""
    path.parent.mkdir(parents=True, exist_ok=True)
    phase = 2 * np.pi * frequency * np.arange(int(8000 * seconds)) / 8000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes((np.sin(phase) * 8000).astype("<i2").tobytes())


@pytest.mark.long
@pytest.mark.ranks
def test_speech_trains_alike_and_times_every_epoch(
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    speech = program("speech")
    lengths = np.random.default_rng(0).lognormal(-0.5, 0.7, (2, 25)).clip(0.2, 5)
    for voice, frequency, row in zip(("en_US_f", "it_IT_m"), (500, 900), lengths, strict=True):
        for number, seconds in enumerate(row):
            record(tmp_path / "sounds" / voice / f"{number}.wav", frequency, seconds)
    contenders = (speech.DDP, speech.CUT, speech.EXACT)
    small = speech.Size(epochs=4, batch=4, seeds=1, contenders=contenders)
    monkeypatch.setattr(speech, "QUICK", small)
    whole = keeps_conventions(
        *run(speech, monkeypatch, capsys, "--quick", "--json", "--data", str(tmp_path))
    )
    results = whole["results"]
    assert results.keys() == set(contenders)
    for figures in results.values():
        (training,) = figures["trainings"]
        assert len(training["epochs_s"]) == 4
        assert figures["total_s"] == pytest.approx(sum(training["epochs_s"]))
        assert figures["epoch_s"] == training["epochs_s"][3]
    accuracies = {figures["accuracy"] for figures in results.values()}
    assert len(accuracies) == 1
    assert results[speech.CUT][f"epoch_of_{speech.CUT}"] == {"all": 1, "least": 1, "most": 1}
    assert whole["config"]["load_before"] >= 0


def test_scenarios_of_synchronisation_name_contenders_that_exist(program: Any) -> None:
    synchronisers = program("synchronisers")
    for scenario in [*synchronisers.SCENARIOS.values(), *synchronisers.QUICK.values()]:
        checked = {name for first, _, other, *_ in scenario.checks for name in (first, other)}
        checked |= {*scenario.accuracy, *scenario.pace}
        checked |= set() if scenario.soonest is None else {scenario.soonest[0]}
        assert checked <= set(scenario.contenders) <= set(synchronisers.CONTENDERS), scenario.name
        assert scenario.emulation(1).seed == 1


def test_the_lstm_of_rnas_rows_trains_under_the_all_reduce(program: Any, one_thread: None) -> None:
    """As in RNA, Table 3, where the all-reduce ends with 88.2 %. One process trains all samples."""
    scenario = program("synchronisers").SCENARIOS["videos"]
    tasks = program("tasks")
    task = tasks.task_of(scenario.task)
    batch = scenario.world * task.batch
    data = tasks.Epoch(task, batch * scenario.steps)
    torch.manual_seed(0)
    network = task.network()
    optimiser = torch.optim.SGD(network.parameters(), scenario.rate, momentum=0.5)
    losses, accuracies = {}, {}
    for number, step in enumerate(torch.randperm(len(data)).split(batch), 1):
        *inputs, classes = task.collate([data[at] for at in step.tolist()])
        optimiser.zero_grad()
        cross_entropy(network(*inputs), classes).backward()
        optimiser.step()
        if number in (scenario.steps // 4, scenario.steps * 2 // 3, scenario.steps):
            *inputs, classes = task.held_out
            with torch.no_grad():
                logits = network(*inputs)
            losses[number] = float(cross_entropy(logits, classes))
            accuracies[number] = float((logits.argmax(1) == classes).float().mean())
    assert 0.8 < accuracies[scenario.steps] < 0.95
    # The target is reached in mid-training, so that a slower approach can reach it, too.
    assert losses[scenario.steps // 4] > task.target > losses[scenario.steps * 2 // 3]


def test_each_forecast_scenario_can_be_simulated(program: Any) -> None:
    forecasts = program("forecasts")
    for each in forecasts.scenarios():
        simulation = forecasts.simulation_of(each["scenario"], each["at"] + 300)
        assert simulation.hello.world == each["scenario"]["workers"], each["kind"]


def test_ways_are_measured_in_turn(program: Any) -> None:
    harness, done = program("harness"), []
    ways = {name: lambda name=name: done.append(name) or name for name in "ab"}
    turns = harness.interleaved(ways, pairs=5, warm=2)
    assert [sorted(done[at : at + 2]) for at in range(0, 14, 2)] == [["a", "b"]] * 7
    assert [sorted(turn.items()) for turn in turns] == [[("a", "a"), ("b", "b")]] * 5
    assert len({tuple(turn) for turn in turns}) == 2  # in either order


@pytest.mark.ranks
def test_synchronisers_counts_each_gradient(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synchronisers = program("synchronisers")
    few = ["bsp", "rna", "local-sgd", "torch DDP", "torch Join", "torch PostLocalSGD"]
    devices = {"b_s": [0.001, 0.004], "delay_s": [0.0, 0.002]}
    delays, even = (
        msgspec.structs.replace(
            synchronisers.QUICK[name], steps=(steps := 12), devices=devices, contenders=few
        )
        for name in ("delays", "even")
    )
    monkeypatch.setattr(synchronisers, "QUICK", {"delays": delays, "even": even})
    whole = keeps_conventions(*run(synchronisers, monkeypatch, capsys, "--quick", "--json"))
    scenarios = whole["results"]["scenarios"]
    assert scenarios.keys() == {delays.name, even.name}
    rows = {name: runs[0] for name, runs in scenarios[delays.name].items()}
    assert rows.keys() == set(few)
    for row in rows.values():
        assert row["gradients_s"] * row["seconds"] + row["dropped"] / 8 == pytest.approx(2 * steps)
        assert row["updates_s"] * row["seconds"] >= steps / 2
        assert 0.1 < row["accuracy"] <= 1
    # All that the ranks computed went into rounds, or was dropped.
    assert sum(rows["rna"]["staleness"]) + rows["rna"]["dropped"] / 8 == 2 * steps
    assert rows["rna"]["response_s"] > 0
    # Both trained with the same batches.
    assert rows["bsp"]["loss"] == pytest.approx(rows["torch DDP"]["loss"], rel=1e-3)


def test_a_training_ends_though_a_rank_leaves_all_its_batches_where_counting_begins(
    program: Any,
) -> None:
    """The others waited for that rank in a barrier, and it waited for the plan of rank 0."""
    trainings = program("trainings")
    pool = Ranks(3)
    devices = json.dumps({"a_s": [0.0] * 3, "b_s": [0.005] * 3})
    work = trainings.Work("digits", "paceline", 0, 32, synchroniser=Pairwise(), segment=16)
    try:
        ranks = pool.run(held_up.train, work, 0.5, env={"PACELINE_EMULATE": devices})
    finally:
        pool.stop()
    assert sum(rank.steps for rank in ranks) == 3 * 32
