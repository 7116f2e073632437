"""The page that compares forecasts with outcomes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline_backend.store import Store
from support.outcomes import keep_outcome

pytestmark = pytest.mark.browser


def drawn(page: Page) -> list[dict[str, Any]]:
    """Name, forecast and measured savings of each trace, once the chart is there."""
    page.wait_for_function("() => document.getElementById('chart-outcomes')?.data?.length === 3")
    script = "document.getElementById('chart-outcomes').data.map(({name, x, y}) => ({name, x, y}))"
    return list(page.evaluate(script))


def test_the_empty_page_says_what_will_be_there(page: Page, web: httpx.Client) -> None:
    page.goto(str(web.base_url))
    page.get_by_role("link", name="Forecasts against outcomes").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Forecasts against outcomes")
    expect(page.locator("#forecasts-empty")).to_contain_text("once 200 steps after it count")
    expect(page.locator("#forecasts-outcomes")).to_be_hidden()
    expect(page.locator("#crumbs")).to_have_text("Forecasts")
    expect(page.locator("#connection-status")).to_have_text("live")


def test_chart_coverage_and_presets(page: Page, web: httpx.Client, store: Store) -> None:
    keep_outcome(store, "a", 0.5, 0.5)
    keep_outcome(store, "b", 0.4, 0.5)
    keep_outcome(store, "c", 0.1, 0.1, policy="lbb")
    keep_outcome(store, "simulated", 0.2, 0.2, policy="bsp", backend="simulated")
    page.goto(str(web.base_url.join("/forecasts")))
    inside, outside, line = drawn(page)
    assert (inside["x"], inside["y"]) == ([0.1, 0.5], [0.1, 0.5])
    assert (outside["x"], outside["y"]) == ([0.4], [0.5])
    assert line["x"] == line["y"] == [0, 0.5]
    expect(page.locator("#forecasts-count")).to_have_text("3 switches")
    expect(page.locator("#forecasts-inside")).to_have_text("67 %")
    expect(page.locator("#forecasts-bias")).to_have_text("+6.7 %")
    rows = page.locator("#forecasts-presets tbody tr")
    expect(rows).to_have_text(["chronica250 %10.0 %18 %+10.0 %", "lbb1100 %0.0 %0.0 %0.0 %"])
    expect(page.locator("#forecasts-items tbody tr")).to_have_count(3)
    link = page.locator("#forecasts-items a").first
    expect(link).to_have_attribute("href", "/runs/c")
    page.select_option("#forecasts-runs", "true")
    expect(rows).to_have_count(3)
    page.select_option("#forecasts-runs", "")
    expect(rows).to_have_count(2)
    keep_outcome(store, "d", 0.3, 0.3, policy="boa")
    page.select_option("#forecasts-runs", "true")
    expect(rows).to_have_count(4)
