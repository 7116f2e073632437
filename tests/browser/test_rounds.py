"""Rounds of relaxed synchronisers on a run's page."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline.wire import RoundBatch
from paceline.wire.synchronisation import convert
from paceline_backend.store import Store
from support.pages import layout_of, open_run, wait_for_chart
from support.records import a_round
from support.training import PARTIAL, Training
from support.waiting import until

pytestmark = pytest.mark.browser

CHARTS = ["contributors", "response", "bytes", "dropped"]  # over steps


def lines(page: Page, chart: str) -> dict[str, dict[int, Any]]:
    """Name of each line → x → y."""
    shown = page.evaluate(
        "id => document.getElementById(id).data.map(({name, x, y}) => [name, x, y])",
        f"chart-{chart}",
    )
    return {name: dict(zip(x, y, strict=True)) for name, x, y in shown}


def test_a_run_without_rounds_does_not_speak_of_them(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r").train(10)
    with page.expect_response("**/synchronisation?*") as answered:
        open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    assert answered.value.json()["newest"] is None
    expect(page.locator("#rounds")).to_be_hidden()
    expect(page.get_by_role("heading", name="Synchronisation")).to_have_count(0)


def test_rounds_appear_by_themselves_and_stay_up_to_date(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(20)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 19)
    expect(page.locator("#rounds")).to_be_hidden()
    training.switch("rna", PARTIAL)
    training.train(10)
    for chart in CHARTS:
        wait_for_chart(page, chart, 29)
        layout = layout_of(page, chart)
        assert layout["range"] == [-0.5, 29.5]
        assert ["line", 19.5, 19.5] in layout["shapes"]
        assert "▸ rna" in layout["texts"]
    contributors = lines(page, "contributors")
    assert [contributors[name][25] for name in ("mean", "fewest", "most")] == [3, 2, 4]
    response = lines(page, "response")
    means = [response[name][25] for name in ("mean", "longest", "reduction", "copying")]
    assert means == pytest.approx([0.015, 0.02, 0.002, 0.0015])
    assert lines(page, "bytes")[""][25] == 100_000
    assert [lines(page, "dropped")[""][step] for step in (20, 21)] == [8, 0]
    words = page.locator("#rounds-words li")
    expect(words).to_contain_text("rna (partial), steps 20–29: 20 rounds")
    expect(words).to_contain_text("with 3.0 of 4 ranks on average; response time 15.0 ms")
    expect(words).to_contain_text("copying 1.5 ms")
    expect(words).to_contain_text("8 samples")
    expect(words).to_contain_text("not applied")
    training.train(4)
    for chart in CHARTS:
        wait_for_chart(page, chart, 33)
    expect(words).to_contain_text("16 samples")
    training.end()
    expect(page.locator("#run-state")).to_have_text("finished")


def test_staleness_is_shown_for_each_policy(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.switch("rna", PARTIAL)
    training.train(10)
    training.switch("chronica")
    training.train(10)
    training.switch("n-soft", convert("partial", {"quorum": 2, "staleness": 4, "mean": False}))
    training.train(10)
    open_run(page, web, "r")
    wait_for_chart(page, "contributors", 29)
    words = page.locator("#rounds-words li")
    expect(words).to_have_count(2)
    expect(words.first).to_contain_text("rna (partial), steps 0–9")
    expect(words.last).to_contain_text("n-soft (partial), steps 20–29")
    page.wait_for_function("() => document.getElementById('chart-staleness').data?.length === 2")
    ages = lines(page, "staleness")
    assert list(ages) == ["rna, from step 0", "n-soft, from step 20"]
    # Of six gradients in two rounds, four are new.
    assert list(ages["rna, from step 0"].values()) == pytest.approx([4 / 6, 2 / 6])
    shown = "document.getElementById('chart-staleness').layout.xaxis.ticktext"
    assert page.evaluate(shown) == ["0", "1 round"]
    old = a_round(training.rounds, step=29, segment=14, staleness=[0, 0, 1])
    training.report(RoundBatch([old]))
    page.wait_for_function(f"() => {shown}.at(-1) === '2 or more'")
    # No line crosses the steps without rounds.
    x = page.evaluate("document.getElementById('chart-contributors').data[0].x")
    mean = lines(page, "contributors")["mean"]
    assert x[9:12] == [9, 19.5, 20]
    assert mean[19.5] is None


def test_rounds_follow_the_steps_that_are_shown(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0, 2.0])
    training.switch("rna", PARTIAL)
    training.train(100)
    training.switch("chronica")
    training.train(400)
    open_run(page, web, "r")
    words = page.locator("#rounds-words li")
    expect(words).to_have_text("No round in the steps shown; the last one was in step 99.")
    page.select_option("#chart-window", "all")
    wait_for_chart(page, "contributors", 99)
    page.evaluate("Plotly.relayout('chart-dropped', {'xaxis.range[0]': 40, 'xaxis.range[1]': 60})")
    wait_for_chart(page, "se", 60)
    wait_for_chart(page, "contributors", 60)
    expect(words).to_contain_text("steps 40–60: 42 rounds")
    # Charts are painted one after the other.
    until(lambda: layout_of(page, "response")["range"] == [39.5, 60.5], "the range")
