"""What a run's banner says where the verdict over its steps says nothing, and after its end."""

from __future__ import annotations

import math
import time

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline.wire import LongPhase, Phase
from paceline_backend.insight import hangs
from paceline_backend.store import Store
from support.pages import open_run, wait_for_chart
from support.training import Training

pytestmark = pytest.mark.browser

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
