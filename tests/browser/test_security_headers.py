"""A browser that keeps to our headers still shows every page."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import ConsoleMessage, Page, expect

from paceline_backend.store import Store
from support.pages import open_switch_dialog, wait_for_chart
from support.training import Training
from support.web import SIGNED_IN, serving

pytestmark = pytest.mark.browser


def csp(page: Page) -> list[str]:
    """What the browser logs about our policy from now on, at any level."""
    violations: list[str] = []

    def logged(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            violations.append(message.text)

    page.on("console", logged)
    return violations


def test_list_and_run_break_no_policy(
    new_page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    violations = csp(new_page)
    training = Training(store, bus_url, "r")
    training.train(60)
    new_page.goto(str(web.base_url))
    expect(new_page.locator("#runs-grid .ag-row")).to_have_count(1)
    new_page.locator("#runs-grid .ag-row").get_by_role("link").click()
    for chart in ("compute", "loss", "share"):
        wait_for_chart(new_page, chart, 59)
    open_switch_dialog(new_page)
    assert violations == []


def test_docs_and_login_break_no_policy(new_page: Page, store: Store, bus_url: str) -> None:
    new_page.context.set_extra_http_headers({})
    violations = csp(new_page)
    with serving(store, bus_url, token="secret") as guarded:
        new_page.goto(str(guarded.base_url.join("/docs")))
        new_page.get_by_label("Token").fill("secret")
        new_page.get_by_role("button", name="Log in").click()
        expect(new_page.locator("#swagger-ui")).to_contain_text("/api/v1/runs")
        new_page.goto("about:blank")
    new_page.context.set_extra_http_headers(SIGNED_IN)
    assert violations == []


def test_a_foreign_script_does_not_run(page: Page, web: httpx.Client) -> None:
    page = page.context.new_page()  # not watched: the browser logs the refusal as an error
    violations = csp(page)
    page.goto(str(web.base_url))
    page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.foreign = true";
            document.body.append(script);
        }"""
    )
    assert page.evaluate("window.foreign") is None
    assert len(violations) == 1
    page.close()
