"""Two operators at one run: the second is told who was faster, and loses nothing."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Page, expect
from starlette.requests import HTTPConnection

from paceline.wire import control
from paceline.wire.bus import connect
from paceline_backend.api import preconditions
from paceline_backend.api.identity import Identity, identity_of
from paceline_backend.store import Store, switches
from support.pages import confirm_switch, open_run, open_switch_dialog, wait_for_chart
from support.training import Training
from support.web import ANY, SIGNED_IN

pytestmark = pytest.mark.browser

RUN = "/api/v1/runs/r"


def named(request: HTTPConnection) -> Identity:
    """Who the header `X-Who` says: these tests are not about tokens."""
    return Identity(request.headers.get("x-who", "nobody"), "operator", "127.0.0.1")


@pytest.fixture(autouse=True)
def _run(monkeypatch: pytest.MonkeyPatch, store: Store, bus_url: str) -> None:
    monkeypatch.setattr(preconditions, "identity_of", named)
    Training(store, bus_url, "r").train(10)


@pytest.fixture
def ada(page: Page, web: httpx.Client) -> Iterator[Page]:
    yield opened(page, web, "ada")
    page.set_extra_http_headers({})


@pytest.fixture
def bob(new_page: Page, web: httpx.Client) -> Page:
    return opened(new_page, web, "bob")


def opened(page: Page, web: httpx.Client, who: str) -> Page:
    """The run's page as this operator sees it."""
    page.set_extra_http_headers({"X-Who": who})
    open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    return page


def newest(web: httpx.Client) -> tuple[str, str]:
    """Who changed the run last, and the time of day as pages show it."""
    row = web.get(f"{RUN}/audit").json()["items"][0]
    return row["who"], time.strftime("%H:%M:%S", time.localtime(row["at"]))


def test_the_second_of_two_switches_is_told_and_keeps_what_it_chose(
    ada: Page, bob: Page, web: httpx.Client, store: Store
) -> None:
    open_switch_dialog(bob, "chronica")
    bob.fill("#policy-parameter-window", "32")
    bob.get_by_label("Reason").fill("rank 3 is slow")
    open_switch_dialog(ada, "sata")
    confirm_switch(ada)
    expect(ada.locator("#switch-dialog")).to_be_hidden()
    # Bob's open dialog says so by now, and still means what it was opened for.
    notice = bob.locator("#switch-notice")
    expect(notice).to_have_text(re.compile(r"^ada switched to sata \d+ s ago\."))
    expect(bob.locator("#switch-in-force")).to_contain_text("sata is to follow")
    confirm_switch(bob)
    who, at = newest(web)
    assert who == "ada"
    expect(notice).to_contain_text(f"ada switched the policy at {at}, since this was shown.")
    expect(notice).to_contain_text("Your switch was not made.")
    assert [row["policy"] for row in switches.rows(store, "r")] == ["sata"]
    expect(bob.locator("#policy-preset-chronica")).to_be_checked()
    expect(bob.locator("#policy-parameter-window")).to_have_value("32")
    confirm_switch(bob)
    expect(bob.locator("#switch-dialog")).to_be_hidden()
    assert [row["policy"] for row in switches.rows(store, "r")] == ["sata", "chronica"]
    assert [row["requested_by"] for row in switches.rows(store, "r")] == ["ada", "bob"]
    lines = ada.locator("#changes li")
    expect(lines).to_have_count(2)
    expect(lines.first).to_contain_text(
        "bob switched the policy to chronica (dashboard): rank 3 is slow"
    )
    expect(lines.last).to_contain_text("ada switched the policy to sata (dashboard)")


def test_who_looks_again_switches_knowingly(ada: Page, bob: Page, store: Store) -> None:
    open_switch_dialog(bob, "chronica")
    bob.fill("#policy-parameter-window", "32")
    open_switch_dialog(ada, "sata")
    confirm_switch(ada)
    look = bob.get_by_role("button", name="Look again")
    look.click()
    expect(look).to_be_hidden()
    expect(bob.locator(".preset", has_text="requested")).to_contain_text("sata")
    expect(bob.locator("#policy-parameter-window")).to_have_value("32")
    confirm_switch(bob)
    expect(bob.locator("#switch-dialog")).to_be_hidden()
    assert [row["policy"] for row in switches.rows(store, "r")] == ["sata", "chronica"]


def test_two_browsers_with_one_shared_token_know_each_other(
    page: Page, web: httpx.Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preconditions, "identity_of", identity_of)
    browser = page.context.browser
    assert browser is not None
    with browser.new_context(extra_http_headers=SIGNED_IN) as context:
        other = context.new_page()
        for tab, who in ((page, "ada"), (other, "bob")):
            open_run(tab, web, "r")
            wait_for_chart(tab, "se", 9)
            open_switch_dialog(tab, "sata" if who == "ada" else "chronica")
            tab.locator("#switch-operator").fill(who)
        confirm_switch(page)
        expect(other.locator("#switch-notice")).to_contain_text("ada switched to sata")
        confirm_switch(other)
        expect(other.locator("#switch-notice")).to_contain_text("Your switch was not made.")
        confirm_switch(other)
        expect(other.locator("#switch-dialog")).to_be_hidden()
        expect(page.locator("#switch-status")).to_contain_text("by bob")
    assert [(row["policy"], row["requested_by"]) for row in switches.rows(store, "r")] == [
        ("sata", "ada"),
        ("chronica", "bob"),
    ]


def test_the_second_to_stop_is_told(bob: Page, web: httpx.Client, bus_url: str) -> None:
    expect(bob.locator("#changes-none")).to_be_visible()
    bob.click("#stop-open")
    bob.fill("#stop-why", "enough")
    body = {"policy": "chronica"}
    web.post(f"{RUN}/policy", json=body, headers={"X-Who": "ada", **ANY})
    bob.click("#stop-confirm")
    problem = bob.locator("#stop-problem")
    expect(problem).to_contain_text(f"ada switched the policy at {newest(web)[1]}")
    with connect(bus_url) as bus:
        assert bus.xlen(control("r")) == 0
        bob.click("#stop-confirm")
        expect(bob.locator("#stop-dialog")).to_be_hidden()
        assert bus.xlen(control("r")) == 1
    expect(bob.locator("#changes li").first).to_contain_text(
        "bob stopped the run (dashboard): enough"
    )
