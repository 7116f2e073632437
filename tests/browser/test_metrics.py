"""Metrics, evaluations and the target of a run on its page."""

from __future__ import annotations

import re
import time
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from paceline.wire import Evaluation, MetricBatch, MetricRecord
from paceline_backend.store import Store, runs
from support.pages import layout_of, open_run, wait_for_chart
from support.training import Training
from support.waiting import until

pytestmark = pytest.mark.browser


def evaluated(step: int, began: float, **values: float) -> Evaluation:
    return Evaluation(0, 0, step, step // 40, 64 * (step + 1), began + 3 * (step + 1), None, values)


def course(page: Page, chart: str) -> list[Any]:
    """x and y of a chart's line."""
    shown: list[Any] = page.evaluate(
        "id => document.getElementById(id)?.data?.map(({x, y}) => [x, y]).at(-1)", chart
    )
    return shown


def test_a_run_without_metrics_shows_none(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    Training(store, bus_url, "r").train(10)
    with page.expect_response("**/runs/r/metrics?*"), page.expect_response("**/r/evaluations?*"):
        open_run(page, web, "r")
    wait_for_chart(page, "se", 9)
    expect(page.locator("#metrics")).to_be_hidden()
    expect(page.get_by_role("heading", name="Metrics")).to_have_count(0)
    expect(page.locator("#target-words")).to_have_text("None is set.")


def test_metrics_appear_by_themselves_each_in_a_chart(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    began = runs.get(store, "r")["started_at"]
    training.train(20)
    open_run(page, web, "r")
    wait_for_chart(page, "se", 19)
    training.report(evaluated(19, began, accuracy=0.5, loss=1.5))
    charts = page.locator("#metrics-evaluations figure")
    expect(charts).to_have_count(2)
    expect(charts.locator("figcaption")).to_contain_text([re.compile("^accuracy"), "loss"])
    words = page.locator("#metrics-words")
    expect(words).to_contain_text("after step 19, epoch 0, 1,280 samples and 60.0 s: accuracy 0.5")
    training.switch("local-sgd")
    training.train(20)
    training.report(evaluated(39, began, accuracy=0.75, loss=1.25))
    until(lambda: course(page, "chart-evaluations-0") == [[19, 39], [0.5, 0.75]], "the newest one")
    page.locator("#chart-evaluations-0").scroll_into_view_if_needed()
    until(lambda: ["line", 19.5, 19.5] in layout_of(page, "evaluations-0")["shapes"], "the switch")
    records = [MetricRecord(0, 0, step, 16.0, {"grad_norm": 1.0}) for step in range(40)]
    training.report(MetricBatch(records))
    training.train(1)
    expect(page.locator("#metrics-training figure")).to_contain_text("grad_norm, in training")
    page.locator("#chart-training-2").scroll_into_view_if_needed()
    until(lambda: (course(page, "chart-training-2") or [[]])[0][-1:] == [39], "its chart")


def test_evaluations_that_could_not_load_are_asked_for_again(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    """A page asks for them once it has loaded; the stream tells only further ones."""
    training = Training(store, bus_url, "r")
    training.train(20)
    training.report(evaluated(19, runs.get(store, "r")["started_at"], accuracy=0.5))
    page.route("**/evaluations?*", lambda route: route.abort())
    with page.expect_event("requestfailed", lambda request: "/evaluations?" in request.url):
        open_run(page, web, "r")
    expect(page.locator("#metrics")).to_be_hidden()
    page.unroute_all()
    until(lambda: course(page, "chart-evaluations-0") == [[19], [0.5]], "the chart")


def test_an_operator_sets_a_target_and_sees_when_it_was_met(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    began = runs.get(store, "r")["started_at"]
    training.train(40)
    training.report(evaluated(19, began, accuracy=0.5))
    open_run(page, web, "r")
    words = page.locator("#target-words")
    expect(page.locator("#metrics")).to_be_visible()
    page.get_by_text("Set a target…").click()
    expect(page.locator("#target-metric")).to_have_value("accuracy")
    page.fill("#target-value", "0.7")
    page.click("#target-set")
    unmet = "accuracy ≥ 0.7 is not met yet; the best so far is 0.5, after step 19."
    expect(words).to_have_text(unmet)
    expect(page.locator("#changes")).to_contain_text("changed the run's target")
    training.report(evaluated(39, began, accuracy=0.75))
    expect(words).to_contain_text("accuracy ≥ 0.7 was met after 2.0 min: in step 39, epoch 0")
    expect(words).to_contain_text("with 2,560 samples (0.75)")
    lines = lambda: [shape[0] for shape in layout_of(page, "evaluations-0")["shapes"]]  # noqa: E731
    until(lambda: lines() == ["line"], "the target's line")
    met = runs.get(store, "r")["target"]["met"]
    assert met["after_s"] == pytest.approx(120)
    page.get_by_text("Set a target…").click()
    page.click("#target-remove")
    expect(words).to_have_text("None is set.")


def test_how_long_a_run_took_and_when_it_will_end(
    page: Page, web: httpx.Client, store: Store, bus_url: str
) -> None:
    training = Training(store, bus_url, "r")
    training.train(20)
    open_run(page, web, "r")
    expect(page.locator("#run-eta")).to_contain_text(re.compile(r"done about (\w+ )?\d\d:\d\d"))
    now = time.time()
    training.end()
    row = runs.get(store, "r")
    assert row["jct_s"] == pytest.approx(now - row["started_at"], abs=60)
    expect(page.locator("#run-facts")).to_contain_text(f"{row['jct_s'] / 60:.1f} min")
    expect(page.locator("#run-eta")).to_be_hidden()
