"""Pages as they show runs, keep up to date, and go on after outages."""

from __future__ import annotations

import math
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from paceline.wire import NodeState, StopTraining, control, decode
from paceline.wire.bus import connect
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, nodes, runs, telemetry
from paceline_backend.store.history import days
from support.pages import (
    open_run,
    wait_for_chart,
)
from support.training import Training
from support.web import serving

pytestmark = pytest.mark.browser


CHARTS = ["compute", "se", "dif", "waste", "loss", "share"]


def test_empty_list_says_how_to_start(page: Page, web: httpx.Client) -> None:
    page.goto(str(web.base_url))
    expect(page.locator("#runs-empty")).to_contain_text("make demo")
    expect(page.locator("#runs-empty")).to_contain_text("paceline run")
    expect(page.locator("#runs-grid")).to_be_hidden()
    expect(page.locator("#nodes")).to_contain_text("No agent")


def test_from_the_list_to_a_run_with_all_charts(
    page: Page,
    web: httpx.Client,
    store: Store,
    bus_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Training(store, bus_url, "old").end()
    training = Training(store, bus_url, "plaid", name="PLAID <b>demo</b>")
    training.train(60)
    with store.read() as connection:
        key = runs.key_of(connection, "plaid")
    days.sum_up(store, key)
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", math.inf)
    node = NodeState("node-1", "node-1.example.org", 16, 2**36, [], 0.0, "0.1.0", ["plaid"])
    telemetry.write(store, [("", node)])
    refused: list[str] = []
    page.on("response", lambda r: refused.append(r.url) if r.status >= 400 else None)
    page.goto(str(web.base_url))
    row = page.locator("#runs-grid .ag-row", has_text="PLAID <b>demo</b>")
    expect(row).to_contain_text("running")
    expect(row).to_contain_text("emulated")
    expect(row.locator("[col-id=se]")).to_contain_text("1.1")
    expect(page.locator("#nodes")).to_contain_text("alive")
    page.select_option("#state-filter", "finished")
    expect(page.locator("#runs-grid .ag-row")).to_have_count(1)
    page.select_option("#state-filter", "")
    row.get_by_role("link").click()
    expect(page.locator("#run-name")).to_have_text("PLAID <b>demo</b>")
    for chart in CHARTS:
        wait_for_chart(page, chart, 59)
        expect(page.locator(f"#chart-{chart} .scatterlayer path").first).to_be_attached()
    expect(page.locator("#run-state")).to_have_text("running")
    expect(page.locator("#run-emulated")).to_be_visible()
    expect(page.locator("#kpi-se")).to_contain_text("1.1")
    expect(page.locator("#kpi-waste")).to_contain_text("%")
    words = page.locator("#attribution-words")
    expect(words).to_contain_text("Ranks 2 and 3 compute 1.")
    assert refused == []
    page.go_back()
    expect(page.locator("#runs-grid .ag-row")).to_have_count(2)


def test_the_list_is_narrowed_down_and_its_address_says_how(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    for run in ("first", "second", "third"):
        Training(store, bus_url, run, name=f"{run} try").end()
    web.put("/api/v1/runs/second/tags/nightly").raise_for_status()
    page.goto(str(web.base_url))
    rows = page.locator("#runs-grid .ag-center-cols-container .ag-row")
    expect(rows).to_have_count(3)
    expect(rows.filter(has_text="second")).to_contain_text("nightly")
    page.get_by_label("Search").fill("THIRD")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("third try")
    page.get_by_label("Tag").select_option("nightly")
    expect(rows).to_have_count(0)
    expect(page.locator("#runs-grid")).to_contain_text("No run matches")
    page.get_by_label("Search").fill("")
    expect(rows).to_contain_text("second try")
    page.get_by_label("Order").select_option("-waste")
    page.wait_for_function("() => location.search === '?tag=nightly&sort=-waste'")
    page.reload()
    expect(rows).to_have_count(1)
    expect(page.get_by_label("Tag")).to_have_value("nightly")
    expect(page.get_by_label("Order")).to_have_value("-waste")
    page.get_by_role("button", name="Show all").click()
    expect(rows).to_have_count(3)
    page.wait_for_function("() => location.search === ''")


def test_what_is_typed_while_the_page_loads_is_kept(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    for run in ("first", "second"):
        Training(store, bus_url, run, name=f"{run} try").end()
    waiting: list[Route] = []
    page.route("**/api/v1/tags*", lambda route: waiting.append(route))
    page.goto(str(web.base_url))
    rows = page.locator("#runs-grid .ag-center-cols-container .ag-row")
    expect(rows).to_have_count(2)
    page.get_by_label("Search").press_sequentially("second")
    for route in waiting:
        route.continue_()
    expect(rows).to_have_count(1)
    expect(page.get_by_label("Search")).to_have_value("second")


def test_new_steps_appear_by_themselves(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(30)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 29)
    training.train(6)
    for chart in CHARTS:
        wait_for_chart(page, chart, 35)
    expect(page.locator("#run-progress")).to_contain_text("step 35")
    training.end()
    expect(page.locator("#run-state")).to_have_text("finished")
    expect(page.locator("#connection-status")).to_have_text("run ended")
    expect(page.locator("#switch-open")).to_be_disabled()
    expect(page.locator("#stop-open")).to_be_disabled()


def test_a_failed_run_shows_the_end_of_its_log(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(10)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    log = page.locator("#run-log")
    expect(log).to_be_hidden()
    expect(page.locator("#verdict-title")).to_contain_text("Ranks 2 and 3", ignore_case=True)
    lines = ["Traceback (most recent call last):", '  File "train.py", line 7, in <module>']
    lines.append("ValueError: <b>no</b> such column")
    summary = "rank 1 exited with code 1; log: /srv/runs/r/1.log"
    training.end("failed", message="\n".join([summary, *lines]), exit_code=1)
    title = page.locator("#verdict-title")
    expect(title).to_have_text("Failed at step 9: rank 1 exited with code 1")
    assert "/srv" not in page.locator("#run-body").inner_text()
    expect(log).to_be_visible()
    assert log.evaluate("pre => pre.textContent") == "\n".join(lines)
    assert log.evaluate("pre => getComputedStyle(pre).whiteSpace").startswith("pre")


def test_lost_connection_is_shown_and_mended(
    page: Page, store: Store, bus_url: str, port: int
) -> None:
    training = Training(store, bus_url, "r")
    training.train(10)
    with serving(store, bus_url, port=port) as web:
        open_run(page, web, "r")
        wait_for_chart(page, "se", 9)
    status = page.locator("#connection-status")
    expect(status).to_have_text("connection lost, retrying")
    training.train(5)
    with serving(store, bus_url, port=port):
        expect(status).to_have_text("live")
        wait_for_chart(page, "se", 14)
        training.train(3)
        wait_for_chart(page, "se", 17)
        page.goto("about:blank")


def test_stop_asks_first(page: Page, web: httpx.Client, store: Store, bus_url: str) -> None:
    Training(store, bus_url, "r").train(10)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    with connect(bus_url) as bus:
        page.click("#stop-open")
        page.locator("#stop-dialog").get_by_role("button", name="Cancel").click()
        assert bus.xlen(control("r")) == 0
        page.click("#stop-open")
        page.click("#stop-confirm")
        expect(page.locator("#stop-dialog")).to_be_hidden()
        [(_, fields)] = bus.xrange(control("r"))
    assert isinstance(decode(fields)[1], StopTraining)


def test_unknown_run_and_unknown_page(page: Page, web: httpx.Client) -> None:
    page.goto(str(web.base_url.join("/runs/nothing")))
    expect(page.get_by_role("heading", name="No such run")).to_be_visible()
    expect(page.locator("#run-missing").get_by_role("link", name="All runs")).to_be_visible()
    expect(page.locator("#run-body")).to_be_hidden()
    expect(page.locator("#connection-status")).to_have_text("no such run")
    page.goto(str(web.base_url.join("/elsewhere")))
    expect(page.get_by_role("heading", name="No such page")).to_be_visible()
    expect(page.locator("#connection-status")).to_have_text("live")


def test_narrow_and_dark(page: Page, web: httpx.Client, store: Store, bus_url: str) -> None:
    Training(store, bus_url, "r").train(10)
    page.set_viewport_size({"width": 390, "height": 844})
    open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("button", name="Switch between light and dark").click()
    page.wait_for_function("() => document.documentElement.dataset.mantineColorScheme === 'dark'")
    page.wait_for_function(
        "() => document.getElementById('chart-se').layout.hoverlabel.bgcolor === "
        "getComputedStyle(document.body).getPropertyValue('--panel').trim()"
    )


@pytest.mark.parametrize("path", ["**/*plotly*.js*", "**/view?*"])
def test_a_page_that_could_not_load_goes_on_later(
    page: Page, web: httpx.Client, store: Store, bus_url: str, path: str
) -> None:
    Training(store, bus_url, "r").train(10)

    def spoil(route: Route) -> None:
        if "/view?" in route.request.url:
            route.fulfill(status=200, content_type="application/json", body='{"id": "r", "na')
        else:
            route.abort()

    page.route(path, spoil)
    page.goto(str(web.base_url.join("/runs/r")))
    expect(page.locator("#connection-status")).to_have_text("connection lost, retrying")
    page.unroute_all()
    expect(page.locator("#connection-status")).to_have_text("live")
    expect(page.locator("#run-problem")).to_be_hidden()
    wait_for_chart(page, "se", 9)


def test_a_page_says_that_the_bus_is_away_and_then_shows_what_came(
    page: Page, store: Store, port: int, tmp_path: Path
) -> None:
    with EmbeddedBus(tmp_path / "bus") as bus:
        training = Training(store, bus.url, "r")
        training.train(10)
        with serving(store, bus.url, port=port) as web:
            open_run(page, web, "r")
            wait_for_chart(page, "se", 9)
            for step in (13, 17):
                bus.kill()
                expect(page.locator("#connection-status")).to_have_text("waiting for the bus")
                expect(page.locator("#page-lost")).to_contain_text("The bus (Redis) does not")
                if step == 17:  # a page that is opened meanwhile
                    page.reload()
                    wait_for_chart(page, "se", 13)
                    expect(page.locator("#connection-status")).to_have_text("waiting for the bus")
                bus.start()
                training.train(4)
                wait_for_chart(page, "se", step)
                expect(page.locator("#connection-status")).to_have_text("live")
                expect(page.locator("#page-lost")).to_be_hidden()
                assert line_to(page, "se", step) == list(range(step + 1))
            page.goto("about:blank")


def line_to(page: Page, chart: str, step: int) -> list[int]:
    """The steps of a chart's line that ends at a step."""
    steps: list[int] = page.evaluate(
        "([id, step]) => document.getElementById(id).data.find(t => t.x.at(-1) === step).x",
        [f"chart-{chart}", step],
    )
    return steps


def test_late_telemetry_of_an_ended_run_is_shown(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(10)
    training.end()
    page.goto(str(web.base_url.join("/runs/r")))
    expect(page.locator("#connection-status")).to_have_text("run ended")
    wait_for_chart(page, "se", 9)
    training.train(4)
    wait_for_chart(page, "se", 13)


def test_a_run_that_ended_while_the_server_was_away(
    page: Page, store: Store, bus_url: str, port: int
) -> None:
    training = Training(store, bus_url, "r")
    training.train(10)
    with serving(store, bus_url, port=port) as web:
        open_run(page, web, "r")
        wait_for_chart(page, "se", 9)
    expect(page.locator("#connection-status")).to_have_text("connection lost, retrying")
    training.train(5)
    training.end()
    with serving(store, bus_url, port=port):
        expect(page.locator("#connection-status")).to_have_text("run ended", timeout=60_000)
        expect(page.locator("#run-state")).to_have_text("finished")
        wait_for_chart(page, "se", 14)
        page.goto("about:blank")
