"""The dashboard behind a reverse proxy that serves it below a path."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from paceline_backend.store import Store
from support.pages import wait_for_chart
from support.training import Training
from support.web import serving

pytestmark = pytest.mark.browser


def test_pages_and_live_updates_below_a_path(page: Page, store: Store, bus_url: str) -> None:
    """The proxy leaves the prefix. One that takes it away asks as if there was no proxy."""
    training = Training(store, bus_url, "r")
    training.train(10)
    asked: list[str] = []
    with serving(store, bus_url, path_prefix="/ml/paceline") as web:
        page.on("request", lambda request: asked.append(urlsplit(request.url).path))
        page.goto(str(web.base_url.join("/ml/paceline/")))
        page.locator("#runs-grid .ag-row a").first.click()
        expect(page.locator("#connection-status")).to_have_text("live")
        wait_for_chart(page, "se", 9)
        training.train(5)
        wait_for_chart(page, "se", 14)
        page.goto(str(web.base_url.join("/ml/paceline/docs")))
        expect(page.locator(".opblock").first).to_be_visible()
        page.go_back()
        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Token")).to_be_visible()
        page.goto("about:blank")
        assert [path for path in asked if not path.startswith("/ml/paceline/")] == []
        assert web.get("/ml/paceline/api/v1/runs/r").json() == web.get("/api/v1/runs/r").json()
