"""Four real ranks in a real browser: an operator sees who is slow, switches, and sees it help."""

from __future__ import annotations

import re
import statistics

import pytest
from playwright.sync_api import Page, expect

from paceline_backend.server.stack import Stack
from support.e2e import PAUSE_S, planned_effect, start_training, wait_for_step
from support.pages import confirm_switch, open_switch_dialog
from support.waiting import TRAINING_S, until

pytestmark = [pytest.mark.browser, pytest.mark.ranks]


def number(page: Page, tile: str) -> float:
    match = re.search(r"[\d.]+", page.locator(f"#{tile}").inner_text().split("\n", 1)[-1])
    return float(match[0]) if match else float("nan")


def test_switch_by_clicking(page: Page, stack: Stack) -> None:
    run = start_training(stack)
    wait_for_step(stack, run, 12)
    page.context.set_extra_http_headers({})  # as a browser that knows no token
    page.goto(stack.login_link())
    page.get_by_role("link", name="train").click()
    expect(page.locator("#run-state")).to_contain_text("running")
    expect(page.locator("#chart-compute")).to_contain_text(re.compile("rank(s 2 and)? 3"))
    expect(page.locator("#kpi-se")).to_contain_text(re.compile(r"\d"))
    before = number(page, "kpi-se")
    assert before > 0

    open_switch_dialog(page, "chronica")
    confirm_switch(page)
    expect(page.locator("#switch-status")).to_contain_text(
        re.compile(r"took effect at step \d+"), timeout=240_000
    )

    switch = stack.api("GET", f"/runs/{run}/switches")[1]
    assert switch["policy"] == "chronica"
    wait_for_step(stack, run, switch["effective_step"] + 14)
    slow = statistics.median(planned_effect(stack, run)[:12])

    def fallen() -> bool:
        return statistics.median(planned_effect(stack, run)[-10:]) < slow / 2

    until(fallen, "steps with half the straggler effect", TRAINING_S, PAUSE_S)
    # The page itself shows further steps, without a reload. A busy machine's delays are in them.
    until(lambda: number(page, "kpi-se") != before, "the tile to change", TRAINING_S, PAUSE_S)
    stack.api("POST", f"/runs/{run}/stop", {"force": False})
    expect(page.locator("#run-state")).to_contain_text(re.compile("stopped|finished"))
