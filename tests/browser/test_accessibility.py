"""Both pages against axe-core's rules, light and dark."""

from __future__ import annotations

import math

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from paceline.wire import NodeState
from paceline_backend.store import Store, nodes, telemetry
from support.pages import (
    confirm_switch,
    keep_forecast,
    open_run,
    open_switch_dialog,
    wait_for_chart,
)
from support.training import PARTIAL, Training

pytestmark = pytest.mark.browser


def check(page: Page) -> None:
    """Reports each violated rule with the elements at fault."""
    violations = Axe().run(page).response["violations"]
    assert [
        (rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in violations
    ] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_is_violated(
    page: Page,
    web: httpx.Client,
    store: Store,
    bus_url: str,
    scheme: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(store, bus_url, "r")
    training.train(20)
    training.train(10, source="coast")
    training.switch("chronica")
    training.train(10)
    training.switch("rna", PARTIAL)
    training.train(20)
    Training(store, bus_url, "old").end()
    monkeypatch.setattr(nodes, "ALIVE_S", math.inf)
    node = NodeState("node-1", "node-1.example.org", 16, 2**36, [], 0.0, "0.1.0", ["r"])
    telemetry.write(store, [("", node)])
    keep_forecast(store, "r")
    open_run(page, web, "r")
    toggle = page.get_by_role("button", name="Switch between light and dark")
    current = "document.documentElement.dataset.mantineColorScheme"
    if page.evaluate(current) != scheme:
        toggle.click()
        page.wait_for_function(f"() => {current} === '{scheme}'")
    wait_for_chart(page, "share", 59)
    expect(page.locator("#workers-grid .ag-row .why")).to_have_count(4)
    wait_for_chart(page, "contributors", 59)
    page.click("#whatif-ask")
    expect(page.locator("#whatif-forecasts li")).to_have_count(2)
    check(page)
    open_switch_dialog(page, "dynamic-batching")
    page.fill("#policy-parameter-capacity", "1, 2")
    confirm_switch(page)
    expect(page.locator("#policy-parameter-capacity-problem")).to_be_visible()
    check(page)
    page.keyboard.press("Escape")
    page.click("#stop-open")
    check(page)
    page.keyboard.press("Escape")
    training.end("failed", message="\n".join(["rank 1 exited with code 1", *["at line 7"] * 100]))
    expect(page.locator("#run-log")).to_be_visible()
    check(page)
    page.goto(str(web.base_url))
    expect(page.locator("#runs-grid .ag-row")).to_have_count(2)
    expect(page.locator("#nodes")).to_contain_text("alive")
    assert page.evaluate(current) == scheme
    check(page)
