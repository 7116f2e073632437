"""All pages against axe-core's rules, light and dark."""

from __future__ import annotations

import math
import time

import httpx
import pytest
import sqlalchemy as sa
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from paceline.wire import NodeState
from paceline_backend.store import Store, nodes, runs, schema, telemetry
from paceline_backend.store.alerts import rows as alerts
from support.outcomes import keep_outcome
from support.pages import (
    confirm_switch,
    keep_forecast,
    open_run,
    open_switch_dialog,
    wait_for_chart,
)
from support.records import add_run, run_day
from support.training import PARTIAL, Training

pytestmark = pytest.mark.browser

SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.long)]


def check(page: Page) -> None:
    """Reports each violated rule with the elements at fault."""
    violations = Axe().run(page).response["violations"]
    assert [
        (rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in violations
    ] == []


CURRENT = "document.documentElement.dataset.mantineColorScheme"


def choose(page: Page, scheme: str) -> None:
    """Switches the open page to a colour scheme; others that open later have it, too."""
    page.wait_for_function(f"() => {CURRENT} !== undefined")
    if page.evaluate(CURRENT) != scheme:
        page.get_by_role("button", name="Switch between light and dark").click()
        page.wait_for_function(f"() => {CURRENT} === '{scheme}'")


@pytest.mark.parametrize("scheme", SCHEMES)
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
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", math.inf)
    node = NodeState("node-1", "node-1.example.org", 16, 2**36, [], 0.0, "0.1.0", ["r"])
    telemetry.write(store, [("", node)])
    keep_forecast(store, "r")
    open_run(page, web, "r")
    choose(page, scheme)
    wait_for_chart(page, "share", 59)
    expect(page.locator("#workers-grid .ag-row .why")).to_have_count(4)
    wait_for_chart(page, "contributors", 59)
    page.click("#whatif-ask")
    expect(page.locator("#whatif-forecasts li")).to_have_count(1)
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
    assert page.evaluate(CURRENT) == scheme
    check(page)


# Each page, and what is on it once it shows what it has.
PAGES = [
    ("/compare?side=r&side=old", "#compare-table td"),
    ("/runs/r/ranks/3", "#rank-facts dd"),
    ("/fleet?by=tag", "#fleet-cost td"),
    ("/alerts", "#alerts-list td"),
    ("/launch?from=r", "#launch-summary:not(:empty)"),
    ("/forecasts", "#forecasts-items td"),
    ("/runs/nothing", "#run-missing h1"),
    ("/runs/nothing/ranks/0", "#rank-problem:not([hidden])"),
    ("/runs/begun", "#verdict-title"),
    ("/elsewhere", "h1"),
]
EMPTY = ["/", "/compare", "/fleet", "/alerts", "/forecasts"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_rule_is_violated_on_other_pages(
    page: Page, web: httpx.Client, store: Store, bus_url: str, scheme: str
) -> None:
    for run in ("r", "old"):
        Training(store, bus_url, run).train(60)
    add_run(store, "begun", state="running")
    keep_outcome(store, "a", 0.5, 0.5)
    alert = {"rule": "run-waste", "run": "r", "severity": "warning", "words": "Ranks wait."}
    times = {"value": 0.4, "threshold": 0.2, "since": 1.0, "raised_at": 2.0}
    with store.write() as connection:
        today, key = int(time.time() // 86_400), runs.key_of(connection, "r")
        connection.execute(sa.insert(schema.run_days).values(run_day(today, key, 7200.0, 900.0)))
        alerts.add(connection, alert | times)
        nodes.expect(connection, "gpu-b1")
    page.goto(str(web.base_url))
    choose(page, scheme)
    for path, there in PAGES:
        page.goto(str(web.base_url.join(path)))
        expect(page.locator(there).first).to_be_visible()
        assert page.evaluate(CURRENT) == scheme
        check(page)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_rule_is_violated_where_there_is_nothing(
    page: Page, web: httpx.Client, scheme: str
) -> None:
    page.goto(str(web.base_url))
    choose(page, scheme)
    for path in EMPTY:
        page.goto(str(web.base_url.join(path)))
        expect(page.locator("#connection-status")).to_have_text("live")
        expect(page.locator(".loading")).to_have_count(0)
        check(page)
