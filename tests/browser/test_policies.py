"""Choosing a policy: the dialog of all presets, what they would save, and `auto`."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from paceline_backend import policies
from paceline_backend.store import Store, switches
from support.pages import (
    confirm_switch,
    keep_forecast,
    open_run,
    open_switch_dialog,
    wait_for_chart,
)
from support.training import PARTIAL, Training
from support.waiting import until
from support.web import ANY

pytestmark = pytest.mark.browser


def opened(page: Page, web: httpx.Client, store: Store, bus_url: str) -> Training:
    """The page of a run of 40 steps under bsp."""
    training = Training(store, bus_url, "r")
    training.train(40)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 39)
    return training


def test_the_dialog_lists_every_preset_with_all_its_parameters(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    open_switch_dialog(page)
    expect(page.locator("#policy-presets .preset")).to_have_count(len(policies.names()))
    expect(page.locator(".preset", has_text="in force")).to_contain_text("bsp")
    for name in policies.names():
        known = policies.get(name)
        page.check(f"#policy-preset-{name}")
        card = page.locator(".preset", has=page.locator(f"#policy-preset-{name}"))
        expect(card).to_contain_text(known.summary)
        expect(card).to_contain_text(known.source)
        for parameter, schema in policies.properties(known.parameters).items():
            control = page.locator(f"#policy-parameter-{parameter}")
            value = schema["default"]
            if schema["type"] == "array":
                expect(control).to_have_value(", ".join(map(str, value)))
            elif schema["type"] == "string":
                expect(control).to_have_value(f'"{value}"')
            else:
                expect(control).to_have_value(f"{value:.9g}")
    confirm_switch(page)
    expect(page.locator("#switch-dialog")).to_be_hidden()
    [made] = switches.rows(store, "r")
    defaults = {
        key: schema["default"] for key, schema in policies.properties(known.parameters).items()
    }
    assert (made["policy"], made["parameters"]) == (name, defaults)


def test_the_dialog_says_what_a_switch_changes_in_the_training(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    open_switch_dialog(page)
    text = page.locator("#switch-changes")
    unchanged, recomposed, changed = "stays the same", "composed differently", "but it changes"
    for name in policies.names():
        page.check(f"#policy-preset-{name}")
        words = {"nothing": unchanged, "batches": recomposed, "training": changed}[
            policies.make(name).changes
        ]
        expect(text).to_contain_text(words)
    page.check("#policy-preset-paceline")
    mode = page.locator("#policy-parameter-mode")
    for value, words in [("free", recomposed), ("exact", unchanged), ("free", recomposed)]:
        mode.select_option(label=value)
        expect(text).to_contain_text(words)
    page.check("#policy-preset-rna")
    page.select_option("#policy-parameter-batches", label="paceline")
    expect(text).to_contain_text(changed)


def test_illegal_values_are_refused_at_their_field(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    sent: list[str] = []
    page.on("request", lambda r: sent.append(r.url) if r.method == "POST" else None)
    open_switch_dialog(page, "dynamic-batching")
    for parameter, given, words, legal in [
        ("capacity", "4, x", "“x” is no number", "4 2; 1,1"),
        ("capacity", "4, 2", "2 given, but the run has 4 ranks", "4 2; 1,1"),
        ("capacity", "4, 2, 0, 1", "must be a number, above 0", "4 2; 1,1"),
        ("dead_band", "2", "must be a number, at least 0, at most 1", "0.1"),
        ("every_steps", "1.5", "must be a whole number, at least 1, at most 10,000", "7"),
        ("every_steps", "", "must be a whole number", "7"),
    ]:
        field = page.locator(f"#policy-parameter-{parameter}")
        field.fill(given)
        confirm_switch(page)
        problem = page.locator(f"#policy-parameter-{parameter}-problem")
        expect(problem).to_contain_text(f"{parameter}: {words}")
        expect(field).to_be_focused()
        expect(field).to_have_attribute("aria-invalid", "true")
        field.fill(legal)
        expect(problem).to_be_hidden()
        assert sent == []
    page.locator("#policy-parameter-dead_band").press("Enter")
    expect(page.locator("#switch-dialog")).to_be_hidden()
    [made] = switches.rows(store, "r")
    kept = made["parameters"]
    assert [kept[name] for name in ("capacity", "dead_band", "every_steps")] == [
        [4, 2, 1, 1],
        0.1,
        7,
    ]
    assert len(sent) == 1


def test_what_the_server_refuses_is_said_at_the_field(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    # A page of another release, which knows of no upper bound.
    page.evaluate(
        """() => {
          const send = window.fetch;
          window.fetch = (target, options) => send(target, {
            ...options, body: options.body?.replace('"dead_band":0.5', '"dead_band":7'),
          });
        }"""
    )
    open_switch_dialog(page, "dynamic-batching")
    page.fill("#policy-parameter-dead_band", "0.5")
    confirm_switch(page)
    problem = page.locator("#policy-parameter-dead_band-problem")
    expect(problem).to_contain_text("dead_band: 7 is not legal for dynamic-batching")
    expect(page.locator("#switch-dialog")).to_be_visible()
    assert switches.rows(store, "r") == []


def test_parameters_in_force_are_shown_and_kept(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = opened(page, web, store, bus_url)
    open_switch_dialog(page, "chronica")
    page.fill("#policy-parameter-window", "16")
    page.select_option("#policy-parameter-picks", label="paper")
    confirm_switch(page)
    training.adopt(1, "chronica")
    training.train(4)
    expect(page.locator("#policy-changed")).to_contain_text("window = 16")
    expect(page.locator("#policy-changed")).to_contain_text("picks = paper")
    open_switch_dialog(page)
    expect(page.locator("#policy-parameter-window")).to_have_value("16")
    page.check("#policy-preset-bsp")
    expect(page.locator("#policy-parameter-window")).to_have_value("64")


def test_what_others_would_save_and_switching_to_one(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    keep_forecast(store, "r")
    expect(page.locator("#whatif-forecasts li")).to_have_count(0)
    page.click("#whatif-ask")
    rows = page.locator("#whatif-forecasts li")
    expect(rows).to_have_count(2)  # the one in force is no other
    expect(rows.first).to_contain_text("chronica would save 50 % ± 10 of the time")
    expect(page.locator("#whatif-words")).to_have_text("bsp takes 400 ms a step.")
    expect(page.locator("#whatif-note")).to_contain_text("ep4ddl: threads are not recorded")
    # From -30 % to 60 %: zero is at a third, the bars end at 50 % and -25 %.
    edges = page.evaluate(
        """() => [...document.querySelectorAll('.saving')].map((track) => {
          const whole = track.getBoundingClientRect();
          return ['.saving-bar', '.saving-whisker'].flatMap((name) => {
            const {left, right} = track.querySelector(name).getBoundingClientRect();
            return [left, right].map((x) => (x - whole.left) / whole.width * 0.9 - 0.3);
          });
        })"""
    )
    assert edges[0] == pytest.approx([0.0, 0.5, 0.4, 0.6], abs=0.01)
    assert edges[1] == pytest.approx([-0.25, 0.0, -0.3, -0.2], abs=0.01)
    page.get_by_role("button", name="Switch to chronica…").first.click()
    expect(page.locator("#policy-preset-chronica")).to_be_checked()
    expect(page.locator("#policy-parameter-window")).to_have_value("32")
    confirm_switch(page)
    expect(page.locator("#switch-dialog")).to_be_hidden()
    expect(page.locator("#whatif-old")).to_be_visible()
    [made] = switches.rows(store, "r")
    assert (made["policy"], made["parameters"]["window"]) == ("chronica", 32)


def test_a_run_of_which_nothing_can_be_said(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    page.route("**/whatif?*", lambda route: route.fulfill(status=503, json={"detail": "try again"}))
    page.click("#whatif-ask")
    expect(page.locator("#whatif-problem")).to_have_text("try again")
    expect(page.locator("#whatif-words")).to_have_text("")


def test_auto_is_set_and_tells_what_it_decided(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = opened(page, web, store, bus_url)
    expect(page.locator("#auto-mode")).to_have_value("off")
    with page.expect_response("**/auto"):
        page.select_option("#auto-mode", "recommend")
    expect(page.locator("#auto-last")).to_have_text("No decision yet.")
    auto = web.get("/api/v1/runs/r/auto").json()
    assert auto["mode"] == "recommend"
    keep_forecast(store, "r")
    expect(page.locator("#auto-last")).to_contain_text("recommends chronica. it would save 50 %")
    page.click("#auto-accept")
    expect(page.locator("#policy-preset-chronica")).to_be_checked()
    page.keyboard.press("Escape")
    training.end()
    expect(page.locator("#auto-mode")).to_be_disabled()
    expect(page.locator("#auto-accept")).to_be_hidden()


def test_auto_may_be_allowed_relaxed_presets(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = opened(page, web, store, bus_url)
    path = "/api/v1/runs/r/auto"
    mode = page.get_by_label("auto: look for a better policy")
    relaxed = page.get_by_role("checkbox", name="relaxed presets, too")
    expect(relaxed).not_to_be_checked()
    expect(relaxed).to_have_accessible_description(re.compile("they change the training"))
    mode.select_option("switch")
    relaxed.check()
    until(lambda: web.get(path).json()["relaxed"], "the permission")
    assert web.get(path).json()["mode"] == "switch"
    mode.select_option("recommend")
    until(lambda: web.get(path).json()["mode"] == "recommend", "the mode")
    assert web.get(path).json()["relaxed"]
    page.reload()
    expect(relaxed).to_be_checked()
    # Another operator's choice is seen, and not undone by the next one made here.
    web.put(path, json={"mode": "recommend", "relaxed": False}, headers=ANY)
    expect(relaxed).not_to_be_checked()
    mode.select_option("switch")
    until(lambda: web.get(path).json()["mode"] == "switch", "the mode")
    assert not web.get(path).json()["relaxed"]
    training.end()
    expect(relaxed).to_be_disabled()


def test_choices_for_auto_hold_in_their_order(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    """What is chosen while an earlier choice is on its way is sent after that, not beside it."""
    opened(page, web, store, bus_url)
    held: list[Route] = []

    def hold(route: Route) -> None:
        if route.request.method == "PUT" and not held:
            held.append(route)
        else:
            route.continue_()

    page.route("**/auto", hold)
    sent: list[dict[str, object]] = []
    page.on("request", lambda r: sent.append(r.post_data_json) if r.method == "PUT" else None)
    with page.expect_request(lambda request: request.method == "PUT"):
        page.select_option("#auto-mode", "recommend")
    page.check("#auto-relaxed")
    page.uncheck("#auto-relaxed")
    page.select_option("#auto-mode", "switch")
    page.check("#auto-relaxed")
    with page.expect_response(lambda answer: '"switch"' in (answer.request.post_data or "")):
        held[0].continue_()
    assert [(body["mode"], body["relaxed"]) for body in sent] == [
        ("recommend", False),
        ("switch", True),
    ]
    auto = web.get("/api/v1/runs/r/auto").json()
    assert (auto["mode"], auto["relaxed"]) == ("switch", True)
    expect(page.locator("#auto-relaxed")).to_be_checked()


def test_what_auto_is_refused_is_said_and_taken_back(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    # A page of another release, where this parameter is no switch.
    page.evaluate(
        """() => {
          const send = window.fetch;
          window.fetch = (target, options) => send(target, {
            ...options, body: options?.body?.replace('"relaxed":true', '"relaxed":"rna"'),
          });
        }"""
    )
    expect(page.locator("#auto-relaxed")).to_be_enabled()
    page.locator("#auto-relaxed").click()
    expect(page.locator("#auto-problem")).to_contain_text("relaxed: ")
    expect(page.locator("#auto-relaxed")).not_to_be_checked()
    page.select_option("#auto-mode", "recommend")
    expect(page.locator("#auto-problem")).to_be_hidden()
    assert web.get("/api/v1/runs/r/auto").json()["mode"] == "recommend"


def test_why_a_synchroniser_was_chosen_is_told(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(10)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    why, earlier = page.locator("#policy-why"), page.locator("#policy-choices li")
    expect(why).to_be_hidden()
    training.switch("adaptive")
    training.why = "all-reduce: too few steps are known: 10 of 16"
    training.train(6)
    expect(why).to_have_text(f"Since step 10 {training.why}.")
    expect(page.locator("#policy-choices")).to_be_hidden()
    training.synchroniser = PARTIAL
    for gain in ("1.80", "1.75"):
        training.why = f"partial: {gain} times the gradients are expected"
        training.train(4)
        expect(why).to_have_text(f"Since step 16 {training.why}.")
    expect(earlier).to_have_text(["From step 10 all-reduce: too few steps are known: 10 of 16."])
    page.reload()
    expect(why).to_have_text(f"Since step 16 {training.why}.")
    training.why = ""
    training.switch("bsp")
    training.train(4)
    expect(why).to_be_hidden()
    expect(page.locator("#policy-choices")).to_be_hidden()
