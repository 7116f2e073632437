"""Runs of more steps than a page holds, or of more workers than it draws one by one."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline_backend.store import Store
from support.pages import layout_of, open_run, wait_for_chart
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
    return [r for r in requests if r.startswith(("steps?", "worker-steps?", "snapshot"))]


def test_a_long_run_opens_with_its_newest_steps_alone(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r", [1.0, 2.0]).train(2100)
    requests = asked(page)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 2099)
    assert ranges(requests) == ["snapshot?last=2000&worker_last=2000"]
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
    assert layout_of(page, "se")["range"] == [2199.5, 2499.5]
    # A switch long ago still tells its effect.
    expect(page.locator("#switch-status")).to_contain_text("time for the same load")
    page.select_option("#chart-window", "all")
    expect(page.locator("#chart-note")).to_contain_text("each point stands for 3 steps")
    first = page.evaluate("document.getElementById('chart-se').data[0].x[0]")
    assert first == 0
    page.click("#chart-live")
    wait_for_chart(page, "se", 2499)
    # Zooming one chart zooms all of them.
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


def test_history_is_asked_for_again_only_when_it_has_a_point_more(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0, 2.0])
    training.train(2500)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 2499)
    requests = asked(page)
    page.select_option("#chart-window", "all")
    expect(page.locator("#chart-note")).to_contain_text("each point stands for 3 steps")
    wait_for_chart(page, "se", 2499 + 1.5)
    training.train(2)
    page.wait_for_timeout(5000)  # two rounds of what the page polls
    whole = "steps?from=0&to=2499&points=1000"
    assert ranges(requests) == [whole, f"worker-{whole}"]
    training.train(2)
    grown = "steps?from=0&to=2503&points=1000"
    until(lambda: page.wait_for_timeout(100) or len(ranges(requests)) > 3, "another history")
    assert ranges(requests)[2:] == [grown, f"worker-{grown}"]
    # What lies behind does not change any more.
    page.evaluate("Plotly.relayout('chart-se', {'xaxis.range[0]': 10, 'xaxis.range[1]': 210})")
    wait_for_chart(page, "se", 210)
    training.train(10)
    page.wait_for_timeout(5000)
    old = "steps?from=10&to=210&points=1000"
    assert ranges(requests)[4:] == [old, f"worker-{old}"]


def test_history_is_shown_when_a_server_in_trouble_is_well_again(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0, 2.0])
    training.train(2500)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 2499)
    page.route("**/steps?*", lambda route: route.fulfill(status=503, body="busy"))
    with page.expect_response("**/steps?*"):
        page.select_option("#chart-window", "all")
    page.unroute_all()

    def shown() -> bool:
        training.train(1)  # the page asks again when it draws
        return "each point stands for 3 steps" in page.locator("#chart-note").inner_text()

    until(shown, "the whole history")


def test_the_heat_map_stays_small_while_history_is_on_its_way(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0] * 17)
    training.train(10)
    training.step = 1_000_000
    training.train(30)
    open_run(page, web, "r")
    wait_for_chart(page, "compute", 1_000_029)
    page.route("**/worker-steps?*", lambda route: route.abort())
    page.select_option("#chart-window", "all")
    page.wait_for_function("() => document.getElementById('chart-se').layout.xaxis.range[0] < 0")
    width, height, last = page.evaluate(
        """(canvas => [canvas.width, canvas.height,
          canvas.getContext('2d').getImageData(canvas.width - 1, 0, 1, 1).data[3]]
        )(document.getElementById('heatmap'))"""
    )
    assert (width <= 2500, height, last) == (True, 17, 255)


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
    wait_for_chart(page, "se", 4998 + 3)
    assert layout_of(page, "se")["shapes"] == [["rect", 99.5, 499.5]]
    page.evaluate("Plotly.relayout('chart-se', {'xaxis.range[0]': 200, 'xaxis.range[1]': 600})")
    wait_for_chart(page, "se", 600)
    assert layout_of(page, "se")["shapes"] == [["rect", 200, 499.5]]
