"""Why ranks wait, and runs of thousands of simulated workers."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline_backend.store import Store
from support.pages import open_run, wait_for_chart
from support.training import Training

pytestmark = pytest.mark.browser

WORLD = 2100


def test_why_ranks_wait(page: Page, web: httpx.Client, store: Store, bus_url: str) -> None:
    training = Training(store, bus_url, "r")
    training.train(30)
    open_run(page, web, "r")
    words = page.locator("#attribution-words")
    expect(words).to_contain_text("Ranks 2 and 3 compute 1.")
    chart = "document.getElementById('chart-attribution').data"
    names, last = page.evaluate(f"[{chart}.map(t => t.name), {chart}[0].x.at(-1)]")
    causes = ["sizes of samples", "slow nodes", "passing slowness", "data loading"]
    assert [name.rsplit(" ", 2)[0] for name in names] == causes
    assert last == 29
    # The parts add up to SP.
    total = page.evaluate(f"{chart}.reduce((sum, t) => sum + t.y.reduce((a, b) => a + b, 0), 0)")
    answer = web.get("/api/v1/runs/r/attribution").json()
    assert total == pytest.approx(answer["sp_s"] * 30)
    why = page.locator("#workers-grid .why")
    expect(why.last).to_have_text("slow node, 2.8×")
    # From the keyboard, too: the explanation shows, and Tab goes on.
    why.last.focus()
    expect(page.get_by_role("tooltip")).to_contain_text("Ranks 2 and 3 compute 1.")
    page.keyboard.press("Tab")
    expect(why.last).not_to_be_focused()
    training.train(10)
    page.wait_for_function(f"() => {chart}[0].x.at(-1) === 39")
    training.end()
    expect(page.locator("#run-state")).to_have_text("finished")


def test_thousands_of_simulated_workers(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    slowness = [1.0] * (WORLD - 1) + [3.0]
    training = Training(store, bus_url, "r", slowness, emulated=False, backend="simulated")
    training.train(8)
    page.goto(str(web.base_url))
    expect(page.locator("#runs-grid .ag-row")).to_contain_text("simulated")
    open_run(page, web, "r")
    wait_for_chart(page, "compute", 7)
    expect(page.locator("#run-emulated")).to_have_text("simulated")
    expect(page.locator("#run-controller")).to_be_hidden()
    expect(page.locator("#heatmap-readout")).to_contain_text("a row is the slowest of 9 ranks")
    assert page.locator("#heatmap").get_attribute("data-rows") == "234"
    label = page.locator("#heatmap").get_attribute("aria-label")
    assert label is not None
    assert "ranks 2,097–2,099" in label
    # The table has all of them, a page at a time, first the one that holds the others up.
    expect(page.locator("#workers-grid .ag-paging-panel")).to_contain_text("1 to 25 of 2,100")
    first = page.locator("#workers-grid [row-index='0']")
    expect(first.locator("[col-id=rank]")).to_have_text(str(WORLD - 1))
    expect(first.locator(".why")).to_contain_text("slow node, ")
    assert page.evaluate("document.querySelectorAll('*').length") < 6000
    training.train(2)
    wait_for_chart(page, "compute", 9)
    page.goto(f"{web.base_url}/runs/r/ranks/7")
    expect(page.locator("#rank-where")).to_contain_text("simulated")
