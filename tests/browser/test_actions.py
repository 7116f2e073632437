"""What an operator may do to a run from its page, and what a viewer reads instead."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline_backend.api import admin
from paceline_backend.api.identity import Identity
from paceline_backend.demo import example
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from paceline_backend.store.alerts import rows as alerts
from support.e2e import ENDLESS, wait_for_step
from support.pages import open_run, wait_for_chart
from support.training import Training

pytestmark = pytest.mark.browser


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
