"""The worker names slow nodes, forecasts what they cost, and replaces them where it may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import msgspec
import pytest
import sqlalchemy as sa

from paceline.core.emulation import Emulation
from paceline.wire import State
from paceline_backend.control.slow_nodes import SlowNodeWatch
from paceline_backend.insight import replacements
from paceline_backend.insight.whatif.answer import NodeForecast
from paceline_backend.store import Store, nodes, runs, schema
from paceline_backend.store.nodes import run_nodes, slowness
from paceline_backend.store.nodes.slowness import RunOnNodes
from support.forecasts import Training, drawn
from support.groups import answer, launch, report


@pytest.fixture(autouse=True)
def _three_nodes(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    answer(store, "n1", "n2", "n3")
    yield


def trained(store: Store, run: str, a_s: list[float], upto: int) -> Training:
    """What the ranks of a run on n1 and n2 have told, two on each."""
    training = Training(drawn(640, 1.0), Emulation(a_s, [0.005] * 4, noise=0.02), global_batch=16)
    placement = ["n1", "n1", "n2", "n2"]
    training.hello = msgspec.structs.replace(training.hello, placement=placement)
    training.train(upto)
    for node in ("n1", "n2"):
        report(store, run, node, State.RUNNING)
    training.store(store, run)
    return training


def verdicts(store: Store, node: str) -> list[dict[str, Any]]:
    with store.read() as connection:
        slow: list[dict[str, Any]] = slowness.history(connection, node, 10)["slow"]
        return slow


def test_a_verdict_is_noted_once_until_it_changes(store: Store, bus_url: str) -> None:
    run = launch(store, bus_url, 2, 2)
    trained(store, run, [1e-5, 1e-5, 3e-5, 3e-5], 150)
    with store.read() as connection:
        [watched] = slowness.watched(connection, "worker")
    watch = SlowNodeWatch(store, bus_url, "worker")
    for step in (149, 149):
        slow = watch.look(watched, step)
        assert slow is not None
        assert slow.node == "n2"
    [kept] = verdicts(store, "n2")
    assert (kept["run"], kept["step"], kept["ended_at"]) == (run, 149, None)
    assert kept["words"].startswith("n2 computes at ")
    assert kept["factor"] > 2
    with store.write() as connection:
        connection.execute(sa.update(schema.worker_steps).values(compute_s=0.01))
    assert watch.look(watched, 149) is None
    [kept] = verdicts(store, "n2")
    assert kept["ended_at"] is not None


def test_few_steps_name_nobody(store: Store, bus_url: str) -> None:
    run = launch(store, bus_url, 2, 2)
    trained(store, run, [1e-5, 1e-5, 3e-5, 3e-5], 12)
    with store.read() as connection:
        [watched] = slowness.watched(connection, "worker")
    assert SlowNodeWatch(store, bus_url, "worker").look(watched, 11) is None
    later = RunOnNodes(watched.key, run, 1, replace_slow_nodes=False)  # its ranks have said nothing
    assert SlowNodeWatch(store, bus_url, "worker").look(later, 200) is None


def test_a_verdict_that_failed_is_made_again_though_no_step_follows(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(store, bus_url, 2, 2)
    trained(store, run, [1e-5, 1e-5, 3e-5, 3e-5], 150)
    watch, stop = SlowNodeWatch(store, bus_url, "worker", pause_s=0.0), threading.Event()
    no_forecasts = mock.Mock(**{"submit.side_effect": RuntimeError})
    with monkeypatch.context() as patch:
        patch.setattr("paceline_backend.control.slow_nodes.judge", mock.Mock(side_effect=OSError))
        watch.scan(no_forecasts, stop)
    assert verdicts(store, "n2") == []
    watch.scan(no_forecasts, stop)
    [kept] = verdicts(store, "n2")
    assert kept["run"] == run


def test_a_spare_that_comes_later_is_used_though_no_step_follows(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(store, bus_url, 2, 2, spares=1, replace_slow_nodes=True)
    training = trained(store, run, [1e-5, 1e-5, 3e-5, 3e-5], 150)
    with store.read() as connection:
        key = runs.key_of(connection, run)
    saved = (0.05, 0.04, 0.06, 0.5, 0.4, 0.6, "That saves half.")
    forecast = NodeForecast(*saved, node="n2", ranks=[2, 3], factor=3.0)
    monkeypatch.setattr(replacements, "forecast_of", mock.Mock(return_value=forecast))
    watch, stop = SlowNodeWatch(store, bus_url, "worker", pause_s=0.0), threading.Event()
    watch.scan(mock.Mock(), stop)
    training.train(training.step + 150)
    training.store(store, run)
    with monkeypatch.context() as patch:
        patch.setattr(nodes, "NODE_ALIVE_S", 0)
        watch.scan(mock.Mock(), stop)
        assert not replacing(store, key)
    watch.scan(mock.Mock(), stop)
    assert replacing(store, key)


def replacing(store: Store, run: int) -> bool:
    """Whether n3 replaces n2."""
    with store.read() as connection:
        rows = run_nodes.of_runs(connection, [run])[run]
    return any(row.node == "n3" and row.replaces == "n2" for row in rows)
