"""Benchmarks: their form, where peers are missing too, what they count, and a bound of theirs."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re
import wave
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from paceline.core.cost import Cost
from paceline.core.emulation import Emulation
from paceline.wire.synchronisation import Pairwise
from support import held_up
from support.ranks import Ranks

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports one of the programs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


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
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    balance, peers = program("balance"), program("peers")
    monkeypatch.setattr(balance, "STEPS", 4)
    missing = peers.Peer("somebody's", "no-such-package", "MIT", peers.torch_sampler)
    monkeypatch.setattr(balance, "PEERS", (peers.PEERS[0], missing))
    page = tmp_path / "page.html"
    whole = keeps_conventions(
        *run(balance, monkeypatch, capsys, "--quick", "--json", "--plot", str(page))
    )
    rows = whole["results"]["settings"]
    assert {row["dif"] for row in rows} == {0, 16, 64}
    assert whole["config"]["peers"]["somebody's"]["version"] is None
    for row in rows:
        assert row["contenders"]["somebody's"] is None
        least = row["bound_over_limit"] or 1.0
        for name, figures in row["contenders"].items():
            assert figures is None or figures["over_limit"] >= least - 1e-9, name
    assert "somebody" in page.read_text()
    assert "not installed: somebody's" in balance.table_of(rows)


def test_streams_reads_tar_files_and_trains_each_sample_once(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("webdataset")
    streams = program("streams")
    monkeypatch.setattr(streams, "FEW", 8)
    monkeypatch.setattr(streams, "SHARD", 250)
    whole = keeps_conventions(*run(streams, monkeypatch, capsys, "--quick", "--json"))
    for ran in whole["results"].values():
        assert ran["distinct"] == ran["samples"] == sum(ran["per_rank"]) == 2000
        assert ran["opened"] >= ran["shards"] == 8


def test_torch_is_bsp(program: Any) -> None:
    """Called as its users do, and planned by Paceline: one order, one time."""
    balance, peers = program("balance"), program("peers")
    setting = balance.Setting(16, 4, 4, uneven=True, padded=False)
    sampler = balance.theirs(setting, peers.PEERS[0])
    assert sampler["over_limit"] == pytest.approx(balance.ours(setting, "bsp", {})["over_limit"])


def test_noise_is_in_no_figure_of_a_peer(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    noisy, peers = program("noisy"), program("peers")
    monkeypatch.setattr(noisy, "STEPS", 4)
    monkeypatch.setattr(noisy, "PEERS", peers.PEERS[:1])
    setting = noisy.Setting("pareto", "quadratic", False, 4)
    figures = []
    for noise in (0.0, 0.5):
        monkeypatch.setattr(noisy, "NOISE", noise)
        figures.append(noisy.measure(setting)[peers.PEERS[0].name])
    assert figures[0] == figures[1]


def test_probes_compares_with_the_paper(
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fewer ranks: what is known of fresh draws, and that messages are what makes probes dear."""
    probes = program("probes")
    monkeypatch.setattr(probes, "WORLD", 20)
    monkeypatch.setattr(probes, "breaking_even", lambda *given: 0.004)
    page = tmp_path / "page.html"
    whole = keeps_conventions(
        *run(probes, monkeypatch, capsys, "--quick", "--json", "--plot", str(page))
    )
    free, here, dear, fresh = whole["results"]["response"].values()
    for n in range(1, 5):
        least = 10 + 40 * (1 - 0.5 ** (1 / n))
        assert fresh[str(n)]["median_ms"] == pytest.approx(least, rel=0.1)
        assert dear[str(n)]["quantiles_ms"][0] >= 4 * (n + 1) - 1e-6
        assert free[str(n)]["median_ms"] <= here[str(n)]["median_ms"] + 1
    assert free["1"]["median_ms"] > free["2"]["median_ms"] > free["4"]["median_ms"]
    assert dear["4"]["median_ms"] > dear["2"]["median_ms"]
    assert "RNA, Fig. 10" in page.read_text()
    assert "28.0" in probes.table(whole["results"] | {"paper_ms": probes.PAPER_MS})


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


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("a_s", [[1, 1], [1, 2], [2, 1, 1], [1, 2, 3]])
def test_no_padded_step_is_faster_than_the_least(program: Any, seed: int, a_s: list[float]) -> None:
    """Every division of a step is tried, and every composition of two steps."""
    bounds, a = program("bounds"), np.array(a_s, float)
    sizes = np.random.default_rng(seed).integers(1, 30, 6).astype(float)
    every = list(itertools.product(range(len(a)), repeat=len(sizes)))
    assert bounds.padded_step_s(sizes, a, 0.5) == pytest.approx(
        min(padded_time_s(sizes, np.array(ranks), a) for ranks in every) + 0.5
    )
    least = min(
        bounds.padded_step_s(sizes[list(some)], a, 0.0)
        + bounds.padded_step_s(np.delete(sizes, some), a, 0.0)
        for some in itertools.combinations(range(len(sizes)), 3)
    )
    assert sizes.sum() / (1 / a).sum() <= bounds.padded_s(sizes, 2, a, 0.0) <= least + 1e-9


def padded_time_s(sizes: Any, ranks: Any, a_s: Any) -> float:
    """Of a step in which each sample has a rank."""
    return max(
        a * own.sum() * sizes[own].max(initial=0.0)
        for a, own in ((a, ranks == rank) for rank, a in enumerate(a_s))
    )


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


def test_frameworks_asks_exact_mode_to_lead_only_where_its_batches_allow_it(program: Any) -> None:
    """Two equal ranks, two steps of four texts: two of 1 token and two of 9, or all of one kind."""
    frameworks = program("frameworks")
    mixed = [[9.0, 1.0], [1.0, 9.0]], [[9.0, 1.0], [1.0, 9.0]]  # sums 10 and 10, padded 18 and 18
    halves = [[9.0, 9.0], [1.0, 1.0]], [[1.0, 1.0], [9.0, 9.0]]  # 18 and 18, padded 18 and 18
    alike = [[9.0, 9.0], [9.0, 9.0]], [[1.0, 1.0], [1.0, 1.0]]  # 18 and 2, padded 18 and 2
    figures = {}
    for padded, exact, exact_s in ((False, mixed, 2.0), (True, halves, 3.6)):
        setting = frameworks.Setting((1.0, 1.0), padded)
        trainings = {
            way: frameworks.Training([*steps, *steps], [took_s / 0.99], loss)
            for way, steps, took_s, loss in (
                (frameworks.SAMPLER, mixed, 3.6 if padded else 2.0, 4.5),
                (frameworks.GROUPED, alike, 2.0, 4.4),
                (frameworks.EXACT, exact, exact_s, 4.5),
                (frameworks.FREE, alike, 2.0, 4.4),
            )
        }
        devices = Emulation([0.1, 0.1], [0.0, 0.0], cost=Cost(padded=padded))
        lengths = np.repeat([1.0, 9.0], 4)
        row = figures[str(setting)] = frameworks.figures(trainings, setting, devices, 2, lengths)
        assert row["ways"][frameworks.EXACT]["of_own_batches_bound"] == pytest.approx(0.99)
        assert row["ways"][frameworks.FREE]["of_lower_bound"] == pytest.approx(0.99)
        assert row["ways"][frameworks.EXACT]["over_group_by_length"] == pytest.approx(2 / exact_s)
        trainings[frameworks.EXACT].batches[0] = alike[0]
        trainings[frameworks.FREE].batches[3] = alike[0]
        wrong = frameworks.figures(trainings, setting, devices, 2, lengths)
        assert (row["other_batches"], wrong["other_batches"]) == (0, 1)
        assert (row["inexact_epochs"], wrong["inexact_epochs"]) == (0, 1)
    checks = {check.name: check.ok for check in frameworks.checks_of(figures, quick=False)}
    assert all(checks.values())
    assert "equal, sum: exact over group_by_length" in checks
    assert "equal, padded: exact over group_by_length" not in checks


@pytest.mark.long
@pytest.mark.ranks
def test_frameworks_trains_alike_and_nobody_beats_the_bounds(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    frameworks = program("frameworks")
    size = frameworks.Size(steps=6, epochs=3, step_s=0.1)
    monkeypatch.setattr(frameworks, "QUICK", size)
    whole = keeps_conventions(*run(frameworks, monkeypatch, capsys, "--quick", "--json"))
    [row] = whole["results"].values()
    assert row["ways"].keys() == {*frameworks.PLAIN, *frameworks.OURS}
    assert row["inexact_epochs"] == row["other_batches"] == 0
    assert row["loss_apart"] < 1e-5
    losses = {figures["loss"] for figures in row["ways"].values()}
    assert len(losses) > 2  # of other batches it is another one
    for figures in row["ways"].values():
        assert len(figures["epochs_s"]) == 2
        assert 0 < figures["of_lower_bound"] < 1
        assert 0 < figures["of_own_batches_bound"] < 1


@pytest.mark.ranks
def test_synchronisers_counts_each_gradient(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    synchronisers = program("synchronisers")
    few = ("bsp", "rna", "local-sgd", "torch DDP", "torch Join", "torch PostLocalSGD")
    devices = Emulation([0.0] * 2, [0.001, 0.004], delay_s=(0.0, 0.002))
    delays, even = (
        dataclasses.replace(
            synchronisers.QUICK[name],
            steps=(steps := 12),
            devices=lambda seed: devices,
            contenders={
                contender: synchronisers.SCENARIOS["delays"].contenders[contender]
                for contender in few
            },
            foretold=name == "delays",
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
    ratios = whole["results"]["simulated_over_real"][delays.name]
    assert ratios.keys() == {"bsp", "rna", "local-sgd"}
    assert all(0.1 < ratio < 10 for ratio in ratios.values())
    # Both trained with the same batches.
    assert rows["bsp"]["loss"] == pytest.approx(rows["torch DDP"]["loss"], rel=1e-3)


@pytest.mark.ranks
def test_leaving_counts_what_a_return_costs_and_keeps_ranks_equal(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leaving = program("leaving")
    few = ("--quick", "--json", "--ranks", "3", "--slower", "1", "4")
    whole = keeps_conventions(*run(leaving, monkeypatch, capsys, *few))
    assert whole["checks"][0]["value"] == 0  # a returned rank has what the others have
    rows = whole["results"]["settings"]
    assert [row["slower"] for row in rows] == [1, 4]
    for row in rows:
        assert row["ranks"] == 3
        if "rounds" not in row:  # cgroups cannot be written here
            continue
        for took in row["rounds"]:
            assert took.keys() == {"filler", "zeros", "left", "return"}
            assert min(took.values()) > 0
        gains = [took["filler"] - took["left"] for took in row["rounds"]]
        pays = row["steps_to_pay_beside_filler"]
        assert (pays is None) == (np.median(gains) <= 0)
        if pays is not None:
            assert pays * np.median(gains) == pytest.approx(row["return_s"])
    assert len(leaving.table_of(rows).splitlines()) == 2 + len(rows)


def test_leaving_knows_when_lbb_leaves_a_rank_out(program: Any) -> None:
    """One sample of the slowest rank takes longer than the others take for all samples."""
    leaving = program("leaving")
    assert leaving.planned(4, 0.003, 0.010, 0.003) == leaving.LOCAL
    assert leaving.planned(4, 0.003, 0.010, 4 * 0.003) < leaving.LOCAL // 4
    assert leaving.planned(4, 0.003, 0.010, 5 * 0.003) == 0


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
