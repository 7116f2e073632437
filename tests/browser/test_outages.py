"""What a page does while the server, or the way to it, is in trouble."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store
from support.pages import open_run, wait_for_chart
from support.training import Training
from support.web import serving

pytestmark = pytest.mark.browser


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
