"""The page that lays runs side by side."""

from __future__ import annotations

import httpx
import pytest
import sqlalchemy as sa
from playwright.sync_api import Page, expect

from paceline.wire import StepBatch
from paceline_backend.store import Store, schema, telemetry
from support.records import add_run, hello, record

pytestmark = pytest.mark.browser
A, B = "3f9a1c07be52", "77b0aa11bb22"


def train(store: Store, run: str, slow_s: float, policy: str) -> None:
    """120 steps; rank 3 computes `slow_s`, the others 0.1 s."""
    key = add_run(store, run, name=f"asr-{policy}", policy=policy, nproc=4, state="finished")
    rows = [
        record(
            step,
            rank,
            compute_s=slow_s if rank == 3 else 0.1,
            step_s=slow_s + 0.1 + 1e-3 * (step * 7 % 5),
            loss=2.0 - 0.005 * step,
        )
        for step in range(120)
        for rank in range(4)
    ]
    telemetry.write(store, [(run, hello(world=4)), (run, StepBatch(rows))])
    with store.write() as connection:
        row = {"run": key, "policy": policy, "parameters": {}, "requested_by": "me"}
        for version, first in ((0, 0), (1, 60)):
            row |= {"version": version, "requested_at": 1.0, "effective_step": first}
            connection.execute(sa.insert(schema.switches).values(row))


def lines(page: Page, chart: str) -> list[list[float]]:
    """First and last x, and how many points, of each line of a chart once it is there."""
    page.wait_for_function("id => document.getElementById(id)?.data?.length > 0", arg=chart)
    script = """id => document.getElementById(id).data.filter(({name}) => name)
        .map(({x}) => [x[0], x.at(-1), x.length])"""
    return list(page.evaluate(script, chart))


def test_two_runs_side_by_side(page: Page, web: httpx.Client, store: Store) -> None:
    train(store, A, 0.3, "bsp")
    train(store, B, 0.15, "paceline")
    page.goto(str(web.base_url))
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare")
    expect(page.locator("#compare-empty")).to_be_visible()
    page.get_by_label("Run of A").select_option(A)
    page.get_by_label("Run of B").select_option(B)
    expect(page.locator("#compare-words")).to_contain_text("B takes 37.3 %")
    rows = page.locator("#compare-table tbody tr")
    expect(rows).to_have_count(9)
    expect(rows.first).to_contain_text("better")
    expect(rows.nth(4)).to_contain_text("none shown")
    assert lines(page, "compare-step_s") == [[0, 119, 120]] * 2
    assert page.url.endswith(f"?side={A}&side={B}"), "the address says what is compared"
    page.get_by_label("Align by").select_option("sample")
    page.wait_for_function(
        "() => document.getElementById('compare-loss').data.at(-1).x.at(-1) === 119 * 16"
    )
    page.reload()
    expect(page.get_by_label("Align by")).to_have_value("sample")
    expect(page.locator("#compare-words")).to_contain_text("B takes 37.3 %")
    page.get_by_role("button", name="Swap A and B").click()
    expect(page.locator("#compare-words")).to_contain_text("more time per step")


def test_both_runs_may_be_chosen_before_the_server_has_answered(
    page: Page, web: httpx.Client, store: Store
) -> None:
    train(store, A, 0.3, "bsp")
    train(store, B, 0.15, "paceline")
    page.goto(str(web.base_url.join("/compare")))
    expect(page.get_by_label("Run of A").locator("option")).to_have_count(3)
    page.evaluate(
        """runs => runs.forEach((run, at) => {
            const choice = document.querySelector(`[aria-label="Run of ${"AB"[at]}"]`);
            choice.value = run;
            choice.dispatchEvent(new Event("change"));
        })""",
        [A, B],
    )
    expect(page.locator("#compare-words")).to_contain_text("B takes 37.3 %")


def test_a_run_that_is_not_among_the_newest_is_found_by_its_name(
    page: Page, web: httpx.Client, store: Store
) -> None:
    train(store, A, 0.3, "bsp")
    for number in range(100):
        add_run(store, f"later-{number}", name=f"later-{number}")
    page.goto(str(web.base_url.join("/compare")))
    choice = page.get_by_label("Run of A")
    expect(choice.locator("option")).to_have_count(101)
    page.get_by_label("Runs whose name has").fill("ASR")
    page.keyboard.press("Enter")
    expect(page.locator("#compare-count")).to_have_text("1 to choose from")
    expect(choice.locator("option")).to_have_count(2)
    choice.select_option(A)


def test_what_is_wrong_is_said(page: Page, web: httpx.Client, store: Store) -> None:
    train(store, A, 0.3, "bsp")
    page.goto(str(web.base_url.join(f"/compare?side={A}&side={A}@9")))
    expect(page.locator("#compare-problem")).to_contain_text("version 9 of the policy")
