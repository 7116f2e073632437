"""Choosing a policy: the dialog of all presets, what they would save, and `auto`."""

from __future__ import annotations

import re

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline import policies
from paceline_backend.store import Store, switches
from support.pages import (
    confirm_switch,
    keep_forecast,
    open_run,
    open_switch_dialog,
    wait_for_chart,
)
from support.training import PARTIAL, Training

pytestmark = pytest.mark.browser


def opened(page: Page, web: httpx.Client, store: Store, bus_url: str) -> Training:
    training = Training(store, bus_url, "r")
    training.train(40)
    keep_forecast(store, "r", decided=False)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 39)
    return training


def test_the_dialog_lists_every_preset_with_all_its_parameters(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    open_switch_dialog(page)
    variants = 1  # the forecast has one of chronica
    expect(page.locator("#policy-presets .preset")).to_have_count(len(policies.names()) + variants)
    expect(page.locator(".preset", has_text="in force")).to_contain_text("bsp")
    for name in policies.names():
        known = policies.get(name)
        page.check(f"#policy-preset-{name}")
        card = page.locator(".preset", has=page.locator(f"#policy-preset-{name}"))
        expect(card).to_contain_text(known.summary)
        expect(page.locator("#switch-summary")).to_contain_text(known.summary)
        expect(page.locator("#switch-summary")).to_contain_text(known.source)
        for parameter, schema in policies.properties(known.parameters).items():
            # The run's sizes differ.
            if schema.get("oneSize"):
                expect(page.locator(f"#policy-parameter-{parameter}")).to_have_count(0)
                continue
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


def test_a_changed_training_wants_a_tick(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    open_switch_dialog(page, "rna")
    accept = page.locator("#switch-accept")
    expect(accept).not_to_be_checked()
    page.click("#switch-confirm")
    expect(page.locator("#switch-problem")).to_have_text(
        "rna changes the training: tick the box first."
    )
    expect(accept).to_be_focused()
    assert switches.rows(store, "r") == []
    page.keyboard.press("Space")
    expect(accept).to_be_checked()
    expect(page.locator("#switch-problem")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(page.locator("#switch-dialog")).to_be_hidden()
    assert [row["policy"] for row in switches.rows(store, "r")] == ["rna"]
    open_switch_dialog(page, "ad-psgd")
    expect(accept).not_to_be_checked()  # each time anew


def test_the_keyboard_alone_switches(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    dialog = page.locator("#switch-dialog")
    expect(page.locator("#switch-open")).to_be_enabled()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(100):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "switch-open":
            break
    page.keyboard.press("Enter")
    expect(dialog).to_be_visible()
    expect(page.locator("#switch-forecast")).to_contain_text("bars bound 95 %")
    expect(page.locator("#policy-preset-bsp")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    assert switches.rows(store, "r") == []
    page.keyboard.press("Enter")
    expect(page.locator("#policy-preset-chronica-window-32")).to_be_focused()  # recommended
    page.keyboard.press("ArrowDown")
    chosen = page.locator("#policy-presets input:checked")
    expect(chosen).to_be_focused()
    name = chosen.input_value()
    assert name != "chronica (window 32)"
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    [made] = switches.rows(store, "r")
    assert made["policy"] == name


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844), (390, 480)])
def test_the_buttons_are_always_in_sight(
    page: Page, web: httpx.Client, store: Store, bus_url: str, width: int, height: int
) -> None:
    opened(page, web, store, bus_url)
    page.set_viewport_size({"width": width, "height": height})
    open_switch_dialog(page, "rna")
    for element in ("switch-accept", "switch-cancel", "switch-confirm"):
        expect(page.locator(f"#{element}")).to_be_in_viewport(ratio=1)
    page.locator("#switch-changes").scroll_into_view_if_needed()
    for element in ("switch-cancel", "switch-confirm"):
        expect(page.locator(f"#{element}")).to_be_in_viewport(ratio=1)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_switch_is_reverted(page: Page, web: httpx.Client, store: Store, bus_url: str) -> None:
    training = opened(page, web, store, bus_url)
    revert = page.locator("#switch-revert")
    expect(revert).to_be_hidden()
    training.switch("chronica")
    training.train(4)
    training.switch("sata")
    training.train(4)
    revert.click()
    expect(page.locator("#policy-preset-chronica")).to_be_checked()
    expect(page.get_by_label("Reason")).to_have_value("back from sata")
    page.keyboard.press("Enter")
    expect(page.locator("#switch-dialog")).to_be_hidden()
    assert [row["policy"] for row in switches.rows(store, "r")] == ["chronica", "sata", "chronica"]


def test_an_effect_stands_beside_its_forecast(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = opened(page, web, store, bus_url)
    training.switch("boa")
    training.train(24)
    forecast = page.locator("#switch-effect .forecast .effect-figure")
    effect = page.locator("#switch-effect .effect:not(.forecast) .effect-figure")
    expect(forecast).to_have_text("+25 % ± 5")
    expect(effect).to_have_text("not yet known")
    training.train(60)
    expect(effect).to_have_text(re.compile(r"^(not yet known|[+−]\d+ % ± \d+)$"))
    [known] = web.get("/api/v1/runs/r/effects").json()
    expect(page.locator("#switch-status")).to_contain_text(known["words"])
    shown = "not yet known" if not known["known"] else f"{abs(100 * known['saving']):.0f} % ±"
    expect(effect).to_contain_text(shown)


def test_what_the_server_refuses_is_said_at_the_field(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    opened(page, web, store, bus_url)
    # The page itself would refuse the value.
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
    best = page.locator("#whatif-recommended")
    expect(best).to_contain_text("chronica (window 32)")
    expect(best).to_contain_text("−50 % ± 10")
    expect(best).to_contain_text("Batches composed differently.")
    rows = page.locator("#whatif-forecasts li")
    expect(rows).to_have_count(1)  # neither the one in force nor the recommended one
    expect(rows).to_contain_text("boa")
    expect(rows).to_contain_text("+25 % ± 5")
    expect(page.locator("#whatif-words")).to_have_text("bsp takes 400 ms a step.")
    expect(page.get_by_role("button", name="would save -25 %")).to_be_visible()
    # Of the time per step: shorter is left of the dots, longer is right of them.
    sides = page.evaluate(
        """() => [...document.querySelectorAll('.panel .interval')].map((line) => {
          const at = (name) => line.querySelector(name).getBoundingClientRect().left;
          return Math.sign(at('.interval-dot') - at('.interval-zero'));
        })"""
    )
    assert sides == [-1, 1]
    page.click("#whatif-look")
    expect(page.locator("#policy-preset-chronica-window-32")).to_be_checked()
    expect(page.locator("#policy-parameter-window")).to_have_value("32")
    confirm_switch(page)
    expect(page.locator("#switch-dialog")).to_be_hidden()
    expect(page.locator("#whatif-old")).to_be_visible()
    [made] = switches.rows(store, "r")
    assert (made["policy"], made["parameters"]["window"]) == ("chronica", 32)


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


def test_why_a_synchroniser_was_chosen_is_told(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(10)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    why, earlier = page.locator("#policy-why"), page.locator("#policy-choices li")
    expect(why).to_be_hidden()
    training.switch("paceline-relaxed")
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
