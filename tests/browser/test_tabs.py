"""Several tabs of a browser on the same run."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Page

from paceline_backend.store import Store
from support.pages import open_run, wait_for_chart
from support.training import Training

pytestmark = pytest.mark.browser


def test_tabs_share_one_stream_and_each_goes_on_without_the_other(
    page: Page, new_page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(10)
    streams: list[str] = []
    for tab in (page, new_page):
        tab.on("request", lambda r: streams.append(r.url) if r.url.endswith("/events") else None)
        open_run(tab, web, "r")
    training.train(5)
    for tab in (page, new_page):
        wait_for_chart(tab, "se", 14)
    assert len(streams) == 1
    with new_page.expect_request("**/events"):
        page.goto("about:blank")  # the tab that had the stream
    training.train(5)
    wait_for_chart(new_page, "se", 19)
    assert len(streams) == 2
    steps = new_page.evaluate("document.getElementById('chart-se').data.at(-1).x")
    assert steps == [*range(20)]
