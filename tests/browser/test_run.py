"""The page of a run: charts, ranks, epochs, forecasts and metrics; and two runs side by side."""

from __future__ import annotations

import math
import re
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Request, expect

from paceline.wire import Evaluation, LongPhase, MetricBatch, MetricRecord, Phase, StepBatch
from paceline_backend.api import admin
from paceline_backend.api.identity import Identity
from paceline_backend.demo import example
from paceline_backend.insight import hangs
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store, runs, telemetry
from paceline_backend.store.alerts import rows as alerts
from support.e2e import ENDLESS, wait_for_step
from support.outcomes import keep_outcome
from support.pages import heat_colour, layout_of, open_run, wait_for_chart
from support.records import add_run, hello, put_switch, record
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


EVEN = [1.0] * 4


def test_a_hung_run_says_whom_all_wait_for_what_that_costs_and_what_to_do(
    page: Page, web: httpx.Client, store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "PHASE_FRESH_S", math.inf)  # ranks would say it again and again
    training = Training(store, bus_url, "r", EVEN)
    training.train(30)
    now = time.time()
    training.report(
        *[
            LongPhase(0, rank, 30, Phase.COMPUTE if rank == 2 else Phase.SYNC, 119.0, now)
            for rank in range(4)
        ]
    )
    page.clock.set_fixed_time(now + 120)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 29)
    expect(page.locator("#verdict-title")).to_have_text(
        "Hung: no step has ended for 2 min, all others wait for rank 2", timeout=20_000
    )
    cost = page.locator("#verdict-cost")
    expect(cost).to_contain_text("All 4 workers stand still: 8 worker-minutes")
    expect(page.locator("#verdict-remedy")).to_contain_text("the stacks of rank 2 say where")
    expect(page.locator("#kpi-step-time-tile")).to_contain_text("no step ends")
    expect(page.locator("#kpi-waste")).to_have_text("100 %")
    expect(page.locator("#kpi-slowest")).to_have_text("rank 2")
    expect(page.locator("#kpi-slowest-bold")).to_have_text("does not end step 30")
    for tile in ("step-time", "waste", "slowest"):
        assert "bad" in (page.locator(f"#kpi-{tile}-tile").get_attribute("class") or "")
    page.get_by_role("link", name="Stacks of rank 2").click()
    expect(page.locator("#stacks-card")).to_be_visible()


def test_epochs_and_their_workers(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(60)
    open_run(page, web, "r")
    page.locator("#epochs summary").click()
    answer = web.get("/api/v1/runs/r/epochs").json()
    newest = answer[-1]["epoch"]
    button = page.locator("#epochs-table button", has_text=f"epoch {newest}")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    workers = web.get(f"/api/v1/runs/r/epochs/{newest}/workers").json()
    rows = page.locator("#epochs-workers tbody tr")
    expect(rows).to_have_count(len(workers))
    slowest = max(workers, key=lambda worker: worker["slowest_share"])
    expect(rows.first).to_contain_text(f"rank {slowest['rank']}")
    expect(rows.first).to_contain_text(f"{100 * slowest['slowest_share']:.0f} %")
    expect(page.locator("#epochs-words")).to_have_text(f"Epoch {newest} by worker")


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


def evaluated(step: int, began: float, **values: float) -> Evaluation:
    return Evaluation(0, 0, step, step // 40, 64 * (step + 1), began + 3 * (step + 1), None, values)


def course(page: Page, chart: str) -> list[Any]:
    """x and y of a chart's line."""
    shown: list[Any] = page.evaluate(
        "id => document.getElementById(id)?.data?.map(({x, y}) => [x, y]).at(-1)", chart
    )
    return shown


def test_a_run_without_metrics_shows_none(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r").train(10)
    with page.expect_response("**/runs/r/metrics?*"), page.expect_response("**/r/evaluations?*"):
        open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    expect(page.locator("#metrics")).to_be_hidden()
    expect(page.get_by_role("heading", name="Metrics")).to_have_count(0)
    expect(page.locator("#target-words")).to_have_text("None is set.")


def test_metrics_appear_by_themselves_each_in_a_chart(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    began = runs.get(store, "r")["started_at"]
    training.train(20)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 19)
    training.report(evaluated(19, began, accuracy=0.5, loss=1.5))
    charts = page.locator("#metrics-evaluations figure")
    expect(charts).to_have_count(2)
    expect(charts.locator("figcaption")).to_contain_text([re.compile("^accuracy"), "loss"])
    words = page.locator("#metrics-words")
    expect(words).to_contain_text("after step 19, epoch 0, 1,280 samples and 60.0 s: accuracy 0.5")
    training.switch("local-sgd")
    training.train(20)
    training.report(evaluated(39, began, accuracy=0.75, loss=1.25))
    until(lambda: course(page, "chart-evaluations-0") == [[19, 39], [0.5, 0.75]], "the newest one")
    page.locator("#chart-evaluations-0").scroll_into_view_if_needed()
    until(lambda: ["line", 19.5, 19.5] in layout_of(page, "evaluations-0")["shapes"], "the switch")
    records = [MetricRecord(0, 0, step, 16.0, {"grad_norm": 1.0}) for step in range(40)]
    training.report(MetricBatch(records))
    training.train(1)
    expect(page.locator("#metrics-training figure")).to_contain_text("grad_norm, in training")
    page.locator("#chart-training-2").scroll_into_view_if_needed()
    until(lambda: (course(page, "chart-training-2") or [[]])[0][-1:] == [39], "its chart")


def test_evaluations_that_could_not_load_are_asked_for_again(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    """A page asks for them once it has loaded; the stream tells only further ones."""
    training = Training(store, bus_url, "r")
    training.train(20)
    training.report(evaluated(19, runs.get(store, "r")["started_at"], accuracy=0.5))
    page.route("**/evaluations?*", lambda route: route.abort())
    with page.expect_event("requestfailed", lambda request: "/evaluations?" in request.url):
        open_run(page, web, "r")
    with page.expect_event("requestfailed", lambda request: "/evaluations?" in request.url):
        pass
    page.unroute_all()
    until(lambda: course(page, "chart-evaluations-0") == [[19], [0.5]], "the chart")


def test_an_operator_sets_a_target_and_sees_when_it_was_met(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    began = runs.get(store, "r")["started_at"]
    training.train(40)
    training.report(evaluated(19, began, accuracy=0.5))
    open_run(page, web, "r")
    words = page.locator("#target-words")
    expect(page.locator("#metrics")).to_be_visible()
    page.get_by_text("Set a target…").click()
    expect(page.locator("#target-metric")).to_have_value("accuracy")
    page.fill("#target-value", "0.7")
    page.click("#target-set")
    unmet = "accuracy ≥ 0.7 is not met yet; the best so far is 0.5, after step 19."
    expect(words).to_have_text(unmet)
    expect(page.locator("#changes")).to_contain_text("changed the run's target")
    training.report(evaluated(39, began, accuracy=0.75))
    expect(words).to_contain_text("accuracy ≥ 0.7 was met after 2.0 min: in step 39, epoch 0")
    expect(words).to_contain_text("with 2,560 samples (0.75)")
    lines = lambda: [shape[0] for shape in layout_of(page, "evaluations-0")["shapes"]]  # noqa: E731
    until(lambda: lines() == ["line"], "the target's line")
    met = runs.get(store, "r")["target"]["met"]
    assert met["after_s"] == pytest.approx(120)
    page.get_by_text("Set a target…").click()
    page.click("#target-remove")
    expect(words).to_have_text("None is set.")


def test_how_long_a_run_took_and_when_it_will_end(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(20)
    open_run(page, web, "r")
    expect(page.locator("#run-eta")).to_contain_text(re.compile(r"done about (\w+ )?\d\d:\d\d"))
    now = time.time()
    training.end()
    row = runs.get(store, "r")
    assert row["jct_s"] == pytest.approx(now - row["started_at"], abs=60)
    expect(page.locator("#run-facts")).to_contain_text(f"{row['jct_s'] / 60:.1f} min")
    expect(page.locator("#run-eta")).to_be_hidden()


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


A, B = "3f9a1c07be52", "77b0aa11bb22"


def train(store: Store, run: str, slow_s: float, policy: str) -> None:
    """120 steps; rank 3 computes `slow_s`, the others 0.1 s."""
    key = add_run(store, run, name=f"asr-{policy}", policy=policy, nproc=4, state="finished")
    rows = [
        record(
            step,
            rank,
            compute_s=slow_s if rank == 3 else 0.1,
            step_s=slow_s + 0.1 + 1e-3 * (step * 7 % 5),
            loss=2.0 - 0.005 * step,
        )
        for step in range(120)
        for rank in range(4)
    ]
    telemetry.write(store, [(run, hello(world=4)), (run, StepBatch(rows))])
    with store.write() as connection:
        row = {"run": key, "policy": policy, "parameters": {}, "requested_by": "me"}
        for version, first in ((0, 0), (1, 60)):
            row |= {"version": version, "requested_at": 1.0, "effective_step": first}
            put_switch(connection, row)


def lines(page: Page, chart: str) -> list[list[float]]:
    """First and last x, and how many points, of each line of a chart once it is there."""
    page.wait_for_function("id => document.getElementById(id)?.data?.length > 0", arg=chart)
    script = """id => document.getElementById(id).data.filter(({name}) => name)
        .map(({x}) => [x[0], x.at(-1), x.length])"""
    return list(page.evaluate(script, chart))


def test_two_runs_side_by_side(page: Page, web: httpx.Client, store: Store) -> None:
    train(store, A, 0.3, "bsp")
    train(store, B, 0.15, "paceline")
    page.goto(str(web.base_url))
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare")
    expect(page.locator("#compare-empty")).to_be_visible()
    page.get_by_label("Run of A").select_option(A)
    page.get_by_label("Run of B").select_option(B)
    expect(page.locator("#compare-words")).to_contain_text("B takes 37.3 %")
    rows = page.locator("#compare-table tbody tr")
    expect(rows).to_have_count(9)
    expect(rows.first).to_contain_text("better")
    expect(rows.nth(4)).to_contain_text("none shown")
    assert lines(page, "compare-step_s") == [[0, 119, 120]] * 2
    assert page.url.endswith(f"?side={A}&side={B}"), "the address says what is compared"
    page.get_by_label("Align by").select_option("sample")
    page.wait_for_function(
        "() => document.getElementById('compare-loss').data.at(-1).x.at(-1) === 119 * 16"
    )
    page.reload()
    expect(page.get_by_label("Align by")).to_have_value("sample")
    expect(page.locator("#compare-words")).to_contain_text("B takes 37.3 %")
    page.get_by_role("button", name="Swap A and B").click()
    expect(page.locator("#compare-words")).to_contain_text("more time per step")


def test_both_runs_may_be_chosen_before_the_server_has_answered(
    page: Page, web: httpx.Client, store: Store
) -> None:
    train(store, A, 0.3, "bsp")
    train(store, B, 0.15, "paceline")
    page.goto(str(web.base_url.join("/compare")))
    expect(page.get_by_label("Run of A").locator("option")).to_have_count(3)
    page.evaluate(
        """runs => runs.forEach((run, at) => {
            const choice = document.querySelector(`[aria-label="Run of ${"AB"[at]}"]`);
            choice.value = run;
            choice.dispatchEvent(new Event("change"));
        })""",
        [A, B],
    )
    expect(page.locator("#compare-words")).to_contain_text("B takes 37.3 %")


def test_a_run_that_is_not_among_the_newest_is_found_by_its_name(
    page: Page, web: httpx.Client, store: Store
) -> None:
    train(store, A, 0.3, "bsp")
    for number in range(100):
        add_run(store, f"later-{number}", name=f"later-{number}")
    page.goto(str(web.base_url.join("/compare")))
    choice = page.get_by_label("Run of A")
    expect(choice.locator("option")).to_have_count(101)
    page.get_by_label("Runs whose name has").fill("ASR")
    page.keyboard.press("Enter")
    expect(page.locator("#compare-count")).to_have_text("1 to choose from")
    expect(choice.locator("option")).to_have_count(2)
    choice.select_option(A)


def test_what_is_wrong_is_said(page: Page, web: httpx.Client, store: Store) -> None:
    train(store, A, 0.3, "bsp")
    page.goto(str(web.base_url.join(f"/compare?side={A}&side={A}@9")))
    expect(page.locator("#compare-problem")).to_contain_text("version 9 of the policy")


@pytest.mark.ranks
def test_a_run_is_started_stopped_and_goes_on_smaller(page: Page, stack: Stack) -> None:
    page.context.set_extra_http_headers({})  # as a browser that knows no token
    page.goto(stack.login_link())
    page.get_by_role("link", name="New run…").click()
    start = page.get_by_role("button", name="Start run")
    start.click()
    expect(page.locator("#launch-problem")).to_contain_text("script")
    expect(page.get_by_label("Script", exact=True)).to_be_focused()
    page.get_by_label("Script", exact=True).fill(str(example("plaid") / "train.py"))
    page.get_by_label("Arguments").fill(f"--epochs\n{ENDLESS}")
    page.get_by_label("Name", exact=True).fill("from the page")
    page.get_by_label("Ranks on each node").fill("3")
    page.get_by_label("Policy", exact=True).select_option("bsp")
    expect(page.locator("#launch-summary")).to_have_text("3 ranks on 1 node (local), policy bsp")
    start.click()
    expect(page.locator("#run-name")).to_have_text("from the page")
    state = page.locator("#run-state")
    expect(state).to_have_text("running", timeout=240_000)
    run = page.url.rsplit("/", 1)[1]
    wait_for_step(stack, run, 6)
    expect(page.locator("#resume-open")).to_be_hidden()
    page.click("#stop-open")
    page.click("#stop-confirm")
    expect(state).to_have_text("stopped", timeout=240_000)

    page.click("#resume-open")
    page.keyboard.press("Escape")
    expect(page.locator("#resume-dialog")).to_be_hidden()
    page.click("#resume-open")
    expect(page.get_by_label("Ranks on each node")).to_have_value("3")
    page.get_by_label("Ranks on each node").fill("2")
    page.fill("#resume-why", "two ranks will do")
    page.click("#resume-confirm")
    expect(page.locator("#resume-dialog")).to_be_hidden()
    expect(state).to_have_text("running", timeout=240_000)
    expect(page.locator("#changes")).to_contain_text("two ranks will do")
    expect(page.locator("#run-device")).to_contain_text("2 workers")
    stack.api("POST", f"/runs/{run}/stop", {"force": True})
    expect(state).to_have_text(re.compile("stopped|failed"), timeout=240_000)

    page.get_by_role("link", name="Run again…").click()
    expect(page.get_by_label("Name", exact=True)).to_have_value("from the page")
    expect(page.get_by_label("Arguments")).to_have_value(f"--epochs\n{ENDLESS}")


def test_a_viewer_is_offered_no_change_and_reads_why(
    monkeypatch: pytest.MonkeyPatch, page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    viewer = Identity("vera", "viewer", "127.0.0.1")
    monkeypatch.setattr(admin, "identity_of", lambda _request: viewer)
    Training(store, bus_url, "r").train(10)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    expect(page.locator("#run-rights")).to_contain_text("vera may look, and not change runs")
    for control in ("stop-open", "resume-open", "switch-open", "auto-mode", "auto-relaxed"):
        expect(page.locator(f"#{control}")).to_be_hidden()
    expect(page.locator("#whatif-ask")).to_be_visible()  # looking at a forecast changes nothing
    page.goto(str(web.base_url.join("/launch")))
    expect(page.locator("#launch-rights")).to_contain_text("vera may look, and start no run")
    expect(page.locator("#launch-start")).to_be_disabled()


def test_a_viewer_reads_alerts_and_is_offered_no_change(
    monkeypatch: pytest.MonkeyPatch, page: Page, web: httpx.Client, store: Store
) -> None:
    viewer = Identity("vera", "viewer", "127.0.0.1")
    monkeypatch.setattr(admin, "identity_of", lambda _request: viewer)
    values = {"rule": "run-waste", "run": "r", "severity": "warning", "value": 0.4}
    values |= {"threshold": 0.2, "words": "Ranks wait.", "since": 1.0, "raised_at": 2.0}
    with store.write() as connection:
        alerts.add(connection, values)
    page.goto(str(web.base_url.join("/alerts")))
    expect(page.locator("#alerts-rights")).to_contain_text("vera may look, and change nothing here")
    expect(page.locator("#alerts-list")).to_contain_text("nobody")
    expect(page.get_by_role("button", name="Acknowledge")).to_have_count(0)
    expect(page.get_by_label("threshold of run-waste")).to_be_disabled()
    expect(page.get_by_role("button", name="Save")).to_have_count(0)
