"""Metrics before and after switches, and a run's quality in its report."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import astuple
from typing import Any

import pytest

from paceline.wire import Evaluation
from paceline_backend.insight import document, quality
from paceline_backend.insight.document.page import seconds
from paceline_backend.insight.quality import MetricChange
from paceline_backend.store import Store, runs
from paceline_backend.store.quality import evaluations, target
from paceline_backend.store.quality.evaluations import Evaluated
from support.training import Training
from support.web import serving


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


def evaluate(training: Training, accuracy: float) -> None:
    """After the newest step; 100 s after the run began, and 1 s for each step."""
    began = runs.get(training.store, training.run)["started_at"]
    step = training.step - 1
    at = began + 100 + step
    message = Evaluation(
        0, 0, step, step // 40, 64 * training.step, at, None, {"accuracy": accuracy}
    )
    training.report(message)


def train(training: Training, *accuracies: float) -> None:
    for accuracy in accuracies:
        training.train(4)
        evaluate(training, accuracy)


@pytest.fixture
def training(store: Store, bus_url: str) -> Training:
    """Four evaluations under bsp, two under local-sgd, none under bsp, and one under paceline."""
    made = Training(store, bus_url, "r")
    train(made, 0.1, 0.2, 0.3, 0.4)
    made.switch("local-sgd")
    train(made, 0.5, 0.7)
    made.switch("bsp")
    made.train(4)
    made.switch("paceline")
    train(made, 0.8)
    return made


def changes(store: Store) -> dict[int, list[MetricChange]]:
    with store.read() as connection:
        return quality.after_switches(connection, runs.key_of(connection, "r"))


def test_a_switch_that_changes_the_training_tells_of_metrics(
    store: Store, training: Training
) -> None:
    """To such a policy and back, but not from bsp to paceline, which trains the same."""
    measured = changes(store)
    assert list(measured) == [1, 2]
    [there], [back] = (map(astuple, each) for each in measured.values())
    assert there == ("accuracy", pytest.approx(0.3), 3, pytest.approx(0.6), 2)
    assert back == ("accuracy", pytest.approx(0.6), 2, None, 0)
    assert quality.words(measured[1]) == (
        "Accuracy: 0.3 (mean of 3 evaluations) before, 0.6 (mean of 2 evaluations) since. "
        "Training continued meanwhile, which also changes metrics."
    )
    assert "not measured since" in quality.words(measured[2])
    training.switch("local-sgd")
    training.train(4)
    evaluate(training, 0.9)
    assert changes(store)[4][0].words == (
        "accuracy: 0.8 (1 evaluation) before, 0.9 (1 evaluation) since"
    )


def test_evaluations_are_read_only_after_a_switch_that_changes_the_training(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(store, bus_url, "r")
    train(training, 0.1)
    training.switch("paceline")
    train(training, 0.2)
    monkeypatch.setattr(evaluations, "read", lambda *_, **__: pytest.fail("evaluations are read"))
    assert changes(store) == {}


def test_a_run_without_evaluations_tells_of_none(store: Store, bus_url: str) -> None:
    training = Training(store, bus_url, "r")
    training.train(4)
    training.switch("local-sgd")
    training.train(4)
    assert changes(store) == {}
    assert quality.words(()) == ""


def test_the_best_value_of_each_metric_is_told_with_when_it_was_first() -> None:
    """Without a target for a metric nobody knows which values are better, unless it is a loss."""

    def evaluated(step: int, **metrics: float | None) -> Evaluated:
        return Evaluated(step, 1, 0, 8 * step, 100.0 + step, 1, metrics)

    seen = [
        evaluated(3, accuracy=0.5, loss=2.0),
        evaluated(7, accuracy=0.7, loss=None),
        evaluated(11, accuracy=0.7, loss=1.0),
        evaluated(15, accuracy=0.6, perplexity=None),
    ]

    def best(target: dict[str, Any] | None) -> list[tuple[Any, ...]]:
        rows = quality.best_values(seen, target, 90.0)
        return [tuple(row[name] for name in ("metric", "figure", "value", "step")) for row in rows]

    loss = ("loss", "best", 1.0, 11)
    assert best(None) == [("accuracy", "least", 0.5, 3), ("accuracy", "greatest", 0.7, 7), loss]
    wanted = {"metric": "accuracy", "direction": ">="}
    assert best(wanted) == [("accuracy", "best", 0.7, 7), loss]
    assert best({"metric": "loss", "direction": ">="})[-1] == ("loss", "best", 2.0, 3)
    first = quality.best_values(seen, wanted, 90.0)[0]
    assert (first["epoch"], first["trained"], first["at"], first["after_s"]) == (1, 56, 107.0, 17.0)
    assert quality.best_values(seen, wanted, None)[0]["after_s"] is None


def test_rest_and_report_tell_the_same(store: Store, training: Training, bus_url: str) -> None:
    with store.write() as connection:
        wanted = {"metric": "accuracy", "value": 0.5, "direction": ">="}
        target.set_target(connection, runs.key_of(connection, "r"), wanted)
    training.end()
    with serving(store, bus_url) as client:
        effects = client.get("/api/v1/runs/r/effects").json()
        report = client.get("/api/v1/runs/r/report").json()["quality"]
        run = client.get("/api/v1/runs/r").json()
        best = client.get("/api/v1/runs/r/best").json()
    assert [len(each["metrics"]) for each in effects] == [1, 1, 0]
    assert effects[0]["metrics"][0]["after_evaluations"] == 2
    assert effects[0]["metrics_words"].startswith("Accuracy: 0.3 (mean of 3 evaluations)")
    assert report["target"] == run["target"]
    assert run["target"]["met"]["after_s"] == pytest.approx(119)
    assert (report["jct_s"], len(report["evaluations"])) == (run["jct_s"], 7)
    assert report["best"] == best
    (accuracy,) = best
    assert (accuracy["figure"], accuracy["value"]) == ("best", 0.8)
    assert accuracy["step"] == run["target"]["best_step"] == run["evaluation"]["step"]
    assert accuracy["after_s"] == pytest.approx(100 + accuracy["step"])
    page = re.sub(r"<[^>]+>", " ", document.render(document.read(store, "r")))
    assert f"Evaluations: accuracy (best 0.8 after step {accuracy['step']})" in page
    assert "Time to accuracy ≥ 0.5" in page
    assert "119 s" in page
    assert "0.5 after step 19, epoch 0, with 1,280 samples." in page
    assert f"Job completion time: {seconds(run['jct_s'])}" in page
    assert "Accuracy: 0.3 (mean of 3 evaluations) before" in page
