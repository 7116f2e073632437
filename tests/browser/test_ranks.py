"""Charts, heat map and the page of one rank: what an operator clicks on to see who is slow."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page, Request, expect

from paceline_backend.store import Store
from support.pages import heat_colour, layout_of, open_run, wait_for_chart
from support.training import Training
from support.waiting import until
from support.web import SIGNED_IN

pytestmark = pytest.mark.browser

SLOW = 3


@pytest.mark.parametrize("ended", [False, True])
def test_a_heat_map_of_two_ranks_over_the_whole_run(
    page: Page, web: httpx.Client, store: Store, bus_url: str, ended: bool
) -> None:
    training = Training(store, bus_url, "r", [1.0, 3.0])
    training.train(700)
    if ended:
        training.end()
        page.goto(str(web.base_url.join("/runs/r")))
    else:
        open_run(page, web, "r")
        page.select_option("#chart-window", "all")
    page.wait_for_function("() => document.getElementById('chart-se')?.layout?.xaxis.range[0] < 0")
    for part in (0.0, 0.5, 1.0):
        assert heat_colour(page, 0, part)[3] == 255
        fast, slow = heat_colour(page, 0, part), heat_colour(page, 1, part)
        assert slow[0] - slow[2] > 60
        assert fast[2] > fast[0]


def test_the_slow_rank_has_colour_until_another_is_pinned(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r", [1.0, 1.0, 1.0, 3.0]).train(60)
    open_run(page, web, "r")
    last = "document.getElementById('chart-compute').data.at(-1)"
    page.wait_for_function(f"() => {last}?.name === 'rank {SLOW}'")
    orange = page.evaluate(f"{last}.line.color")
    page.fill("#chart-rank", "1")
    page.keyboard.press("Enter")
    expect(page.locator("#chart-pinned")).to_have_text("rank 1 pinned")
    page.wait_for_function(f"() => {last}.name === 'rank 1'")
    assert page.evaluate(f"{last}.line.color") != orange
    page.click("#chart-unpin")
    page.wait_for_function(f"() => {last}.name === 'rank {SLOW}'")
    # A click on a line pins its rank.
    box = page.locator("#chart-compute .nsewdrag").bounding_box()
    assert box is not None
    y = page.evaluate(
        """() => {
          const chart = document.getElementById('chart-compute');
          const line = chart.data.find(t => t.name === 'rank 0');
          return chart._fullLayout.yaxis.d2p(line.y[30]);
        }"""
    )
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + y)
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + y)
    expect(page.locator("#chart-pinned")).to_contain_text("pinned")


def test_smoothing_and_the_wall_clock(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r", [1.0, 2.0]).train(200)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 199)
    spread = """() => {
      const {y} = document.getElementById('chart-se').data.at(-1);
      return Math.max(...y) - Math.min(...y);
    }"""
    smooth = page.evaluate(spread)
    page.get_by_role("button", name="raw", exact=True).click()
    page.wait_for_function(f"smooth => ({spread})() > 1.5 * smooth", arg=smooth)
    page.get_by_role("button", name="clock").click()
    page.wait_for_function(
        "() => document.getElementById('chart-se')?.layout?.xaxis.type === 'date'"
    )
    texts = page.evaluate("document.getElementById('chart-se')?.layout?.xaxis.ticktext")
    assert all(":" in text for text in texts)
    expect(page.locator("#heatmap-labels")).to_contain_text("time")
    page.get_by_role("button", name="steps", exact=True).click()
    page.wait_for_function(
        "() => document.getElementById('chart-se')?.layout?.xaxis.type === 'linear'"
    )
    assert layout_of(page, "se")["range"] == [-0.5, 199.5]


def test_a_chart_without_values_has_no_made_up_axis(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r", [1.0, 2.0])
    open_run(page, web, "r")
    page.wait_for_function("() => document.getElementById('chart-waste')?.layout")
    assert page.evaluate("document.getElementById('chart-waste').layout.yaxis.ticktext") == []
    assert "first step" in layout_of(page, "waste")["texts"][0]
    expect(page.locator("#heatmap-empty")).to_contain_text("first step")


def test_from_the_heat_map_to_a_rank_by_mouse_and_keyboard(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0, 1.0, 1.0, 3.0])
    training.train(60)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 59)
    canvas = page.locator("#heatmap")
    readout = page.locator("#heatmap-readout")

    def hovered() -> bool:  # the heat map may still be drawn, and move, when the chart is there
        canvas.hover(position={"x": 190, "y": 7})
        canvas.hover(position={"x": 200, "y": 7})
        return "rank 0, step" in readout.inner_text()

    until(hovered, "the mouse to find rank 0", pause_s=0.2)
    canvas.focus()
    for _ in range(SLOW):
        page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text(f"rank {SLOW}, step")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/r/ranks/{SLOW}")
    expect(page.locator("#rank-title")).to_have_text(f"rank {SLOW}")
    expect(page.locator("#rank-verdict-words")).to_contain_text("Rank 3 computes")
    expect(page.locator("#gantt-steps")).to_have_text("steps 57 to 59")
    expect(page.locator("#gantt rect.phase.compute")).to_have_count(12)
    expect(page.locator("#rank-facts")).to_contain_text("Compute")
    expect(page.locator("#log-problem")).not_to_have_text("")  # no agent has this run's log
    page.wait_for_function("() => document.getElementById('chart-ratio').data?.length")
    # New steps come by themselves; earlier ones on request.
    training.train(3)
    expect(page.locator("#gantt-steps")).to_have_text("steps 60 to 62")
    page.click("#gantt-back")
    expect(page.locator("#gantt-steps")).to_have_text("steps 57 to 59")
    training.train(3)
    page.click("#gantt-follow")
    expect(page.locator("#gantt-steps")).to_have_text("steps 63 to 65")
    page.locator("#rank-pick-place").get_by_role("link", name="1", exact=True).click()
    expect(page.locator("#rank-title")).to_have_text("rank 1")
    expect(page.locator("#rank-verdict-title")).to_have_text("Like the others")


def test_a_rank_that_there_is_not(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r", [1.0, 2.0]).train(4)
    page.goto(str(web.base_url.join("/runs/r/ranks/7")))
    expect(page.locator("#rank-problem")).to_have_text("Run r has 2 ranks: 0 to 1.")
    expect(page.locator("#connection-status")).to_have_text("no such rank")
    page.goto(str(web.base_url.join("/runs/nothing/ranks/0")))
    expect(page.locator("#rank-problem")).to_contain_text("no run nothing")
    expect(page.locator("#connection-status")).to_have_text("no such run")


def test_the_page_of_a_rank_asks_only_when_the_stream_brings_something(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r", [1.0, 2.0])
    training.train(40)
    training.end()
    pending: set[Request] = set()
    asked: list[str] = []

    def ask(request: Request) -> None:
        if "/runs/r" in request.url and not request.url.split("?")[0].endswith("/events"):
            pending.add(request)
            asked.append(request.url)

    def minute() -> list[str]:
        """What the page asks in a minute of its own clock, but whether more of the run has come."""
        asked.clear()
        context.clock.run_for(60_000)
        until(
            lambda: page.title() and not pending, "all answers"
        )  # asking for the title lets events come
        return [url for url in asked if "/logs/" not in url and not url.endswith("/runs/r")]

    browser = page.context.browser
    assert browser is not None
    with browser.new_context(extra_http_headers=SIGNED_IN) as context:  # a clock is never removed
        context.clock.install()
        page = context.new_page()
        page.on("request", ask)
        page.on("requestfinished", lambda request: pending.discard(request))
        page.on("requestfailed", lambda request: pending.discard(request))
        page.goto(str(web.base_url.join("/runs/r/ranks/1")))
        expect(page.locator("#connection-status")).to_have_text("run ended")
        page.wait_for_function("() => document.getElementById('chart-times').data?.length")
        expect(page.locator("#gantt-steps")).to_have_text("steps 37 to 39")
        expect(page.locator("#rank-phase")).to_have_text("finished")
        minute()
        minute()  # for parts that an answer of another part changes
        assert minute() == []
