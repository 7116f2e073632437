"""The client for notebooks, and `paceline runs` on it, against a real server."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pandas as pd
import pyarrow.parquet as pq
import pytest

import paceline
from paceline.client import Server
from paceline.wire import RankDevice, StepBatch
from paceline_backend.store import Store, telemetry
from paceline_backend.store.history import days
from support.command_line import in_process
from support.records import add_run, adopted, hello, put_switch, record

RUN, OTHER = "3f9a1c07be52", "3f00aa11bb22"


@pytest.fixture
def server(client: httpx.Client) -> Iterator[Server]:
    with paceline.connect(str(client.base_url)) as connected:
        yield connected


def train(store: Store, run: str, slow_s: float = 0.2, steps: int = 60, **columns: Any) -> None:
    """Rank 1 computes `slow_s` in each step, rank 0 0.1 s, and steps take 0.1 s longer."""
    key = add_run(store, run, **columns)
    rows = [
        record(step, rank, compute_s=(0.1, slow_s)[rank], step_s=slow_s + 0.1 + 1e-4 * (step % 5))
        for step in range(steps)
        for rank in (0, 1)
    ]
    device = RankDevice("cpu", "Xeon", 4, 1 << 34, threads=2, emulated=True)
    introduced = hello(devices=[device, device])
    telemetry.write(store, [(run, introduced), (run, StepBatch(rows)), (run, adopted(0, 0))])
    with store.write() as connection:
        row = {"run": key, "policy": "bsp", "parameters": {}, "requested_by": "me"}
        for version, first in ((0, 0), (1, 20)):
            row |= {"version": version, "requested_at": 1.0, "effective_step": first}
            put_switch(connection, row)
    days.sum_up(store, key)


def test_runs_and_tables_of_a_run(server: Server, store: Store, tmp_path: Path) -> None:
    train(store, RUN)
    add_run(store, OTHER, name="night")
    assert [run.id for run in server.runs()] == [OTHER, RUN]
    assert [run.id for run in server.runs(limit=1)] == [OTHER]
    table = server.runs(waste_min=0.1).table()
    assert list(table.id) == [RUN]
    assert table.waste[0] == pytest.approx(0.25)
    run = server.run("3f9")
    assert (run.id, run.about["name"]) == (RUN, RUN)
    steps = run.steps()
    assert isinstance(steps, pd.DataFrame)
    assert list(steps.step) == list(range(60))
    assert steps.waste.mean() == pytest.approx(0.25)
    assert list(run.steps(5, 7).step) == [5, 6, 7]
    assert list(run.steps(since=1_058).step) == [58, 59]
    ranks = run.worker_steps(0, 1, ranks=[1])
    assert list(ranks.memory_bytes) == [3_000_000_000] * 2
    assert list(run.switches().effective_step) == [0, 20]
    assert len(run.epochs()) == 15
    assert list(run.segments().seq) == [0]
    assert run.samples(0, 0)[0]["samples"] == [0, 1]
    assert run.verdict()["to"] == 59
    assert list(server.history("policy").steps) == [60]
    file = run.export(tmp_path / "steps.parquet")
    assert pq.read_table(file).num_rows == 60
    with pytest.raises(paceline.PacelineError, match=r"must end with \.csv"):
        run.export(tmp_path / "steps.xlsx")
    with pytest.raises(paceline.PacelineError, match="2 runs begin with it"):
        server.run("3f")
    with pytest.raises(paceline.PacelineError, match="sort"):
        server.runs(sort="colour")


def test_a_figure_and_labels(server: Server, store: Store) -> None:
    train(store, RUN)
    run = server.run(RUN)
    figure = run.plot(["step_s", "waste"])
    assert [trace.name for trace in figure.data] == ["Time per step, s", "Waste"]
    assert list(figure.data[0].x) == list(range(60))
    assert {shape.x0 for shape in figure.layout.shapes} == {20}
    with pytest.raises(paceline.PacelineError, match="choose from step_s"):
        run.plot(["speed"])
    run.tag("nightly")
    run.note("with new data")
    assert [run.id for run in server.runs(tag="nightly", text="new data")] == [RUN]
    assert list(server.tags().tag) == ["nightly"]
    run.untag("nightly")
    assert run.refresh()["tags"] == []


def test_other_frames(client: httpx.Client) -> None:
    with pytest.raises(paceline.PacelineError, match="'pandas' or 'polars'"):
        paceline.connect(str(client.base_url), frames="arrow")


def test_runs_on_the_command_line(
    client: httpx.Client,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main = in_process(monkeypatch, capsys)
    train(store, RUN)
    train(store, OTHER, slow_s=0.12, name="night")
    at = ("--server", str(client.base_url))

    def said(*words: str) -> str:
        code, out, err = main("runs", *words, *at)
        assert code == 0, err
        return out

    assert RUN in said() and OTHER in said()
    assert OTHER not in said("--waste-min", "0.2")
    assert OTHER not in said("--waste-min", "0.2", "--sort=-waste")
    assert said("--since", "2020-01-01").count("3f") == 0
    shown = said("show", "3f9")
    assert RUN in shown and "25.0 %" in shown and "verdict" in shown
    row = next(line for line in shown.splitlines() if "Xeon" in line)
    assert row.split() == ["0-1", "Xeon", "(emulated)", "4", "2", "16.0", "GiB"]
    compared = said("compare", "3f9", "3f0")
    assert "B takes" in compared and RUN in compared and OTHER in compared
    file = tmp_path / "ranks.csv"
    said("export", "3f9", "-o", str(file), "--table", "worker-steps")
    with file.open() as opened:
        assert len(list(csv.DictReader(opened))) == 120
    assert "nightly" in said("tag", "3f9", "nightly", "asr", "--yes")
    assert RUN in said("--tag", "asr") and OTHER not in said("--tag", "asr")
    assert "asr" in said("untag", "3f9", "nightly", "--yes")
    said("note", "3f9", "new data", "--yes")
    assert "new data" in said("show", "3f9")
    code, _, err = main("runs", "show", "3f", *at)
    assert (code, "2 runs begin with it" in err) == (2, True)
    assert main("runs", "export", "3f9", "-o", "x.txt", *at)[0] == 2


def test_compare_says_what_differs(server: Server, store: Store) -> None:
    train(store, RUN, steps=100)
    train(store, OTHER, slow_s=0.12, steps=100)
    answer = server.compare(RUN, OTHER)
    assert answer["words"] == ["B takes 26.6 % ± 0.0 less time per step."]
    rows = {row["figure"]: row for row in answer["differences"]}
    [change] = rows["step_s"]["changes"]
    assert change["value"] == pytest.approx(-0.08)
    assert change["low"] <= change["value"] <= change["high"]
    assert (change["known"], change["better"]) == (True, True)
    [loss] = rows["loss"]["changes"]
    assert (loss["value"], loss["known"], loss["better"]) == (0, False, None)
    parts = server.compare(f"{RUN}@0", f"{RUN}@1", f"{RUN}:98-")
    spans = [(side["from"], side["to"], side["version"]) for side in parts["sides"]]
    assert spans == [(None, None, 0), (40, 99, 1), (98, 99, 1)]
    assert parts["words"][1] == "C: too few steps to compare."
    for side, message in (
        (f"{RUN}@7", "no step was planned by version 7"),
        (f"{RUN}:x", "RUN:100-499"),
    ):
        with pytest.raises(paceline.PacelineError, match=message):
            server.compare(RUN, side)
