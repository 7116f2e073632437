"""What a reader takes out of a run's page: pictures, numbers, and its address."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline_backend.store import Store
from support.pages import layout_of, open_run, wait_for_chart
from support.training import Training

pytestmark = pytest.mark.browser


@pytest.fixture
def run(page: Page, web: httpx.Client, store: Store, bus_url: str) -> Page:
    Training(store, bus_url, "r", [1.0, 2.0]).train(40)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 39)
    return page


def saved(page: Page, chart: str, form: str) -> tuple[str, bytes]:
    """Chooses from a card's menu; the file's name and content."""
    menu = page.locator(f"details.save:has([data-chart='{chart}'])")
    menu.locator("summary").click()
    with page.expect_download() as download:
        menu.locator(f"[data-save='{form}']").click()
    expect(menu).not_to_have_attribute("open", "")
    return download.value.suggested_filename, Path(download.value.path()).read_bytes()


def test_each_chart_is_a_picture_and_a_table(run: Page) -> None:
    name, content = saved(run, "chart-se", "csv")
    head, *rows = content.decode().splitlines()
    assert name == "paceline-r-se.csv"
    assert head.startswith("step,") and head.endswith("SE")
    drawn = run.evaluate("document.getElementById('chart-se').data.at(-1)")
    assert len(rows) == len(drawn["x"])
    assert [float(row.rsplit(",", 1)[1]) for row in rows] == drawn["y"]
    name, content = saved(run, "chart-se", "svg")
    text = content.decode()
    assert name == "paceline-r-se.svg" and text.startswith("<svg") and ">SE<" in text
    assert "inherit" not in text, "fonts of the page are not there in a file"
    name, content = saved(run, "chart-compute", "png")
    assert name == "paceline-r-compute.png" and content.startswith(b"\x89PNG")
    assert int.from_bytes(content[16:20]) >= 1800, "sharp enough to print"


def test_the_heat_map_is_saved_too(run: Page) -> None:
    name, content = saved(run, "heatmap", "csv")
    rows = content.decode().splitlines()
    assert name == "paceline-r-heatmap.csv"
    assert rows[0].startswith("rank,step 0,step 1,") and rows[0].count(",") == 40
    assert [row.split(",")[0] for row in rows[1:]] == ["0", "1"]
    _, content = saved(run, "heatmap", "png")
    assert content.startswith(b"\x89PNG")


def test_menus_close_as_menus_do(run: Page) -> None:
    menu = run.locator("details.save:has([data-chart='chart-loss'])")
    menu.locator("summary").press("Enter")
    expect(menu).to_have_attribute("open", "")
    run.keyboard.press("Escape")
    expect(menu).not_to_have_attribute("open", "")
    expect(menu.locator("summary")).to_be_focused()
    menu.locator("summary").click()
    run.locator("#run-name").click()
    expect(menu).not_to_have_attribute("open", "")


def test_what_is_chosen_is_in_the_address_and_comes_back(run: Page) -> None:
    assert "?" not in run.url
    run.click("#chart-smoothing [data-value='1']")
    run.click("#heatmap-order [data-value='cause']")
    run.fill("#chart-rank", "1")
    run.press("#chart-rank", "Enter")
    run.wait_for_function("() => location.search === '?smoothing=1&rank=1&order=cause'")
    run.locator("#chart-se").scroll_into_view_if_needed()
    box = run.locator("#chart-se .nsewdrag").bounding_box()
    assert box is not None
    y = box["y"] + box["height"] / 2
    run.mouse.move(box["x"] + box["width"] * 0.25, y)
    run.mouse.down()
    run.mouse.move(box["x"] + box["width"] * 0.75, y, steps=5)
    run.mouse.up()
    run.wait_for_function("() => location.search.startsWith('?from=')")
    address, shown = run.url, layout_of(run, "se")["range"]
    run.reload()
    run.wait_for_function(
        "range => JSON.stringify(document.getElementById('chart-se')?.layout?.xaxis?.range)"
        " === JSON.stringify(range)",
        arg=shown,
    )
    assert run.url == address
    pressed = "[aria-pressed='true']"
    expect(run.locator(f"#chart-smoothing {pressed}")).to_have_attribute("data-value", "1")
    expect(run.locator(f"#heatmap-order {pressed}")).to_have_attribute("data-value", "cause")
    expect(run.locator("#chart-pinned")).to_have_text("rank 1 pinned")
    run.click("#chart-live")
    run.wait_for_function("() => location.search === '?smoothing=1&rank=1&order=cause'")
