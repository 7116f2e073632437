"""Runs of more steps than a page holds, or of more workers than it draws one by one."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline_backend.store import Store
from support.pages import heat_colour, layout_of, open_run, wait_for_chart, wait_for_range
from support.training import Training
from support.waiting import until

pytestmark = pytest.mark.browser


def asked(page: Page) -> list[str]:
    """Fills with what a page asks of the API from now on: `steps?from=0&…`."""
    requests: list[str] = []
    page.on(
        "request", lambda r: requests.append(r.url.rsplit("/", 1)[-1]) if "/api/" in r.url else None
    )
    return requests


def ranges(requests: list[str]) -> list[str]:
    """What was asked for but the newest steps, which come whenever there are some."""
    return [r for r in requests if r.startswith("view?") and not r.startswith("view?since=")]


def test_a_long_run_opens_with_its_newest_steps_alone(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r", [1.0, 2.0]).train(2100)
    requests = asked(page)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 2099)
    assert ranges(requests) == ["view?last=511"]
    assert layout_of(page, "se")["range"] == [1799.5, 2099.5]


def test_history_beyond_the_pages_memory(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0, 2.0])
    training.train(40)
    training.switch("chronica")
    training.train(2460)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 2499)
    wait_for_range(page, "se", 2199.5, 2499.5)
    # A switch long ago still tells its effect.
    expect(page.locator("#switch-status")).to_contain_text("time for the same load")
    page.select_option("#chart-window", "all")
    expect(page.locator("#chart-note")).to_contain_text("each point stands for 3 steps")
    # The middle of steps 0 to 2.
    page.wait_for_function("() => document.getElementById('chart-se').data[0].x[0] === 1")
    page.click("#chart-live")
    for chart in (
        "compute",
        "se",
        "waste",
        "loss",
        "share",
    ):  # none is drawn anew while one is used
        wait_for_range(page, chart, 2199.5, 2499.5)
    # Zooming one chart zooms all of them.
    page.locator("#chart-se").scroll_into_view_if_needed()
    box = page.locator("#chart-se .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_function(
        "() => document.getElementById('chart-loss').layout.xaxis.range[1] < 2400"
    )
    assert layout_of(page, "loss")["range"] == layout_of(page, "se")["range"]
    # So does pointing at a step.
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    expect(page.locator("#chart-waste .hoverlayer .legend")).to_be_visible()


def test_charts_begin_with_what_is_here_while_history_is_on_its_way(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0] * 17)
    training.train(10)
    training.step = 1_000_000
    training.train(30)
    open_run(page, web, "r")
    wait_for_chart(page, "compute", 1_000_029)
    page.route("**/view?from*", lambda route: route.abort())
    page.select_option("#chart-window", "all")
    expect(page.locator("#chart-note")).to_contain_text("earlier steps are loading")
    wait_for_range(page, "se", 999_999.5, 1_000_029.5)
    assert heat_colour(page, 0, 0.0)[3] == 255
    page.unroute_all()
    training.train(2)
    page.wait_for_function("() => document.getElementById('chart-se').layout.xaxis.range[0] < 0")
    expect(page.locator("#chart-note")).not_to_contain_text("loading")
    assert page.evaluate("document.getElementById('heatmap').width") <= 2500
    until(lambda: heat_colour(page, 0, 1.0)[3] == 255, "the newest step in the heat map")
    assert heat_colour(page, 0, 0.5)[3] == 0  # no step has run there


def test_old_outages_of_the_controller_are_marked(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0, 2.0])
    training.train(100)
    training.train(400, source="coast")
    training.train(4500)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 4999)
    assert layout_of(page, "se")["shapes"] == []
    page.select_option("#chart-window", "all")
    expect(page.locator("#chart-note")).to_contain_text("each point stands for")
    wait_for_chart(page, "se", 4998 + 2.5)
    assert layout_of(page, "se")["shapes"] == [["rect", 99.5, 499.5]]
    page.evaluate("Plotly.relayout('chart-se', {'xaxis.range[0]': 200, 'xaxis.range[1]': 600})")
    wait_for_chart(page, "se", 600)
    assert layout_of(page, "se")["shapes"] == [["rect", 200, 499.5]]
