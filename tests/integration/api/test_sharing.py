"""A run's report as an HTML file, and its steps as a trace, from a real server."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline_backend.insight import trace
from paceline_backend.store import Store
from support.command_line import Main
from support.records import add_run
from support.shown import SLOW, STEPS, SWITCHED, WORLD, slow_rank

RUN = "3f9a1c07be52"


class Page(HTMLParser):
    """What a page says, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words = ""
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "srcset", "data", "action"):
                self.addresses.append(str(value))

    def handle_data(self, data: str) -> None:
        self.words += " " + " ".join(data.split())


def html(client: httpx.Client, run: str = RUN) -> str:
    answer = client.get(f"/api/v1/runs/{run}/report", params={"format": "html"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    return answer.text


def test_a_report_is_one_file_with_all_that_is_known(store: Store, client: httpx.Client) -> None:
    slow_rank(store, args=["<script>alert(1)</script>", "--lr=3"])
    text = html(client)
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not re.search(r"url\(|@import|https?:", text)
    for words in (
        RUN,
        "Rank 3",
        "What to do:",
        "Slowest worker",
        "fluid limit",
        "ada",
        "paceline",
        "<script>alert(1)</script> --lr=3",
        "n2",
        "2–3",
        "Computing time of each rank ÷ median of the step",
        "Loss",
    ):
        assert words in page.words, words
    assert text.count("<figure>") == 5


def test_waste_is_that_of_all_steps(store: Store, client: httpx.Client) -> None:
    slow_rank(store)
    waits_s = SWITCHED * (WORLD - 1) * 0.2
    computes_s = WORLD * (SWITCHED * 0.3 + (STEPS - SWITCHED) * 0.1)
    words = Page(html(client)).words
    assert f"Waste {100 * waits_s / computes_s:.3g} %" in words
    assert f"ranks waited {waits_s / 3600:.2g} h for slower ranks" in words


def test_reports_of_runs_without_steps_and_of_failed_ones(
    store: Store, client: httpx.Client
) -> None:
    add_run(store, "young")
    words = Page(html(client, "young")).words
    assert "No verdict yet" in words and "no step is complete" in words
    slow_rank(store, "failed", state="failed", message="rank 1 failed: OutOfMemory\n  line 2")
    words = Page(html(client, "failed")).words
    assert "The run failed" in words and "rank 1 failed: OutOfMemory" in words


def test_a_report_of_a_simulated_run_opens_with_that_word(
    store: Store, client: httpx.Client
) -> None:
    add_run(store, "virtual", backend="simulated")
    add_run(store, "real")
    assert "Simulated:" in Page(html(client, "virtual")).words
    assert "Simulated:" not in Page(html(client, "real")).words


def test_a_report_is_json_unless_asked_otherwise(store: Store, client: httpx.Client) -> None:
    slow_rank(store)
    assert "presets" in client.get(f"/api/v1/runs/{RUN}/report").json()
    wrong = client.get(f"/api/v1/runs/{RUN}/report", params={"format": "pdf"})
    assert wrong.status_code == 422 and "format" in wrong.text
    missing = client.get("/api/v1/runs/nobody/report", params={"format": "html"})
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"


def traced(client: httpx.Client, **params: int) -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs/{RUN}/trace", params=params)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    document: dict[str, Any] = answer.json()
    check_format(document)
    return document


def check_format(document: dict[str, Any]) -> None:
    """The trace event format: what each kind of event must have, and that slices nest."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and event["name"]
        thread = (event["pid"], event["tid"])
        if event["ph"] == "M":
            kinds = {
                "process_name": "name",
                "thread_name": "name",
                "process_sort_index": "sort_index",
                "thread_sort_index": "sort_index",
            }
            assert set(event["args"]) == {kinds[event["name"]]}
            named.add(thread)
        elif event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] > 0
            slices.setdefault(thread, []).append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert (event["ph"], event["s"]) == ("i", "g")
            assert event["ts"] >= 0
        assert thread in named, "a thread is named before its events"
    for each in slices.values():
        outer: list[tuple[float, float]] = []
        for begin, end in sorted(each, key=lambda piece: (piece[0], -piece[1])):
            while outer and outer[-1][1] <= begin + 0.05:
                outer.pop()
            assert not outer or end <= outer[-1][1] + 0.05, "slices overlap"
            outer.append((begin, end))


def test_a_trace_has_a_process_a_node_and_a_thread_a_rank(
    store: Store, client: httpx.Client
) -> None:
    slow_rank(store)
    document = traced(client, **{"from": 48, "to": 51})
    events = document["traceEvents"]
    processes = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert set(processes) == {"run train", "node n1", "node n2"}
    threads = {
        e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"
    }
    assert threads["rank 1"][0] == processes["node n1"]
    assert threads["rank 2"][0] == processes["node n2"]
    steps = [e for e in events if e["name"].startswith("step ")]
    assert len(steps) == 4 * WORLD
    assert {e["args"]["step"] for e in steps} == {48, 49, 50, 51}
    slow = [e for e in events if (e["pid"], e["tid"]) == threads[f"rank {SLOW}"] and "dur" in e]
    first = slow[:4]
    assert [e["name"] for e in first] == ["step 48", "data", "compute", "reduce"]
    assert [round(e["dur"] / 1e6, 3) for e in first[1:]] == [0.001, 0.3, 0.02]
    fast = [e for e in events if (e["pid"], e["tid"]) == threads["rank 0"] and "dur" in e]
    assert [e["name"] for e in fast[:5]] == ["step 48", "data", "compute", "wait", "reduce"]
    assert round(fast[3]["dur"] / 1e6, 3) == 0.2
    began = document["otherData"]["began_at"]
    assert began + (slow[2]["ts"] / 1e6) == pytest.approx(1_000.0 + 48 * 0.34, abs=1e-3)


def test_a_trace_has_switches_verdicts_and_rounds(store: Store, client: httpx.Client) -> None:
    slow_rank(store)
    events = traced(client, **{"from": 0})["traceEvents"]
    instants = [e for e in events if e["ph"] == "i"]
    switch = next(e for e in instants if e["cat"] == "switch")
    first = min(e["ts"] for e in events if e["name"] == f"step {SWITCHED}")
    assert (switch["name"], switch["ts"]) == ("switch to paceline", first)
    assert switch["args"]["parameters"] == {"window": 32}
    causes = [e for e in instants if e["cat"].startswith("verdict")]
    assert any("Rank 3" in e["name"] and e["args"]["to_do"] for e in causes)
    copies = [e for e in events if e["name"] == "copy"]
    assert [round(e["dur"]) for e in copies] == [62_500]


def test_a_trace_without_a_range_has_the_newest_steps(
    store: Store, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_rank(store)
    monkeypatch.setattr(trace, "TRACE_STEPS", 10)
    monkeypatch.setattr(trace, "_CHUNK_ROWS", 3 * WORLD)  # several reads, of three steps each
    steps = [
        e["args"]["step"]
        for e in traced(client)["traceEvents"]
        if e["name"].startswith("step ") and e["tid"] == 1
    ]
    assert steps == list(range(STEPS - 10, STEPS))
    assert all(later == before + 1 for before, later in pairwise(steps))


def test_traces_of_nothing(store: Store, client: httpx.Client) -> None:
    add_run(store, RUN)
    assert all(event["ph"] == "M" for event in traced(client)["traceEvents"])
    wrong = client.get(f"/api/v1/runs/{RUN}/trace", params={"from": 5, "to": 4})
    assert (wrong.status_code, "is before step 5 (from)" in wrong.json()["detail"]) == (422, True)
    assert client.get("/api/v1/runs/nobody/trace").status_code == 404


def test_commands_write_files(
    store: Store, client: httpx.Client, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_rank(store)
    monkeypatch.chdir(tmp_path)
    where = ("--server", str(client.base_url).rstrip("/"))
    code, out, err = main("report", "3f9", "-o", "run.html", *where)
    assert (code, out) == (0, ""), err
    assert "wrote run.html" in err
    assert Page((tmp_path / "run.html").read_text()).words.count(RUN) >= 1
    code, _, err = main("trace", "3f9", "--steps", "10:19", *where)
    assert code == 0, err
    document = json.loads((tmp_path / f"paceline-{RUN}.trace.json").read_text())
    check_format(document)
    assert document["otherData"]["first_step"] == 10
    assert document["otherData"]["last_step"] == 19
    code, out, err = main("report", "3f9", "--json", *where)
    assert code == 0 and "presets" in json.loads(out)
    assert sorted(p.name for p in tmp_path.glob("*.html")) == ["run.html"]


def test_commands_leave_no_half_files(
    store: Store, client: httpx.Client, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_rank(store)
    monkeypatch.chdir(tmp_path)
    where = ("--server", str(client.base_url).rstrip("/"))
    code, _, err = main("report", "nobody", *where)
    assert (code, "no run's id begins with it" in err) == (2, True)
    code, _, err = main("report", RUN, "-o", "nowhere/run.html", *where)
    assert code != 0 and "nowhere/run.html cannot be written: No such file" in err
    for wrong in ("9:3", ":", "all", "3"):
        code, _, err = main("trace", RUN, "--steps", wrong, *where)
        assert (code, f"--steps {wrong}: give FIRST:LAST" in err) == (2, True)
    assert all(path.name.startswith("paceline.db") for path in tmp_path.iterdir())
