"""Requests that fail between the database and the bus: what is stored says what happened."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import pytest
import redis

from paceline.wire import (
    Kill,
    Launch,
    NodeState,
    RunChanged,
    RunState,
    State,
    commands,
    decode,
    live,
)
from paceline_backend import requests
from paceline_backend.backends.base import Credentials
from paceline_backend.backends.local import Local
from paceline_backend.requests import streams
from paceline_backend.store import Store, StoreUnavailableError, nodes, runs, telemetry
from paceline_backend.store.audit import ChangeFilter, RequestedChange, Requester, page
from paceline_backend.store.new_runs import NewRun
from support.records import add_run

ME = Requester("me")
stopping = import_module("paceline_backend.requests.stop")  # the package has a function `stop`


@pytest.fixture
def store(store: Store) -> Store:
    node = NodeState("n1", "n1.local", 8, 2**30, [], time.time(), "0.1.0", [])
    telemetry.write(store, [("", node)])
    with store.write() as connection:
        nodes.expect(connection, "n1")  # its agent has a session
    return store


def orders(bus_url: str) -> list[Any]:
    """What the agent of node n1 is told."""
    with redis.Redis.from_url(bus_url) as bus:
        entries: Any = bus.xrange(commands("n1"))
        return [decode(fields)[1] for _, fields in entries]


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (redis.ConnectionError("gone"), "the bus became unreachable before its launch"),
        (redis.TimeoutError("slow"), "the bus became unreachable before its launch"),
        (redis.ResponseError("full"), "it could not be launched: ResponseError: full"),
        (KeyError("surprise"), "it could not be launched: KeyError: 'surprise'"),
        (ValueError("\ud800"), r"it could not be launched: ValueError: \ud800"),
    ],
)
def test_a_launch_that_fails_ends_the_run(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def start(*_: object) -> None:
        raise error

    monkeypatch.setattr(Local, "start", start)
    new = NewRun("train", "train.py", 2, "bsp")
    with pytest.raises(type(error)):
        requests.launch(store, bus_url, new, ME, start=True)
    [row], _ = runs.page(store)
    assert (row["state"], row["message"]) == ("failed", why)
    with redis.Redis.from_url(bus_url) as bus:
        [(_, fields)] = bus.xrange(live(row["id"]))
        assert decode(fields) == (row["id"], RunChanged()), "open pages hear of it"


def test_why_a_launch_failed_is_logged_although_the_database_goes_away(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(*_: object) -> None:
        raise KeyError("surprise")

    def end(*_: object) -> None:
        raise StoreUnavailableError("gone")

    monkeypatch.setattr(Local, "start", start)
    monkeypatch.setattr(runs, "end", end)
    with pytest.raises(StoreUnavailableError):
        requests.launch(store, bus_url, NewRun("train", "train.py", 2, "bsp"), ME, start=True)
    [row], _ = runs.page(store)
    assert f"run {row['id']} was not launched: it could not be launched: KeyError" in caplog.text


def test_text_that_no_message_holds_fails_the_run(store: Store, bus_url: str) -> None:
    new = NewRun("train", "train.py", 2, "bsp", env={"NAME": "\ud800"})
    with pytest.raises(UnicodeEncodeError):
        requests.launch(store, bus_url, new, ME, start=True)
    [row], _ = runs.page(store)
    assert row["state"] == "failed"
    assert "it could not be launched: UnicodeEncodeError" in row["message"]


def test_a_stop_is_written_down_before_anybody_is_told_and_may_be_asked_for_again(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_run(store, "r", state="running")
    written: list[int] = []

    def publish(*_: object, **__: object) -> None:
        with store.read() as connection:
            written.append(len(page(connection, ChangeFilter("r", action="run.stop"))[0]))
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(stopping, "publish", publish)
    for _ in range(2):
        with pytest.raises(redis.ConnectionError):
            requests.stop(store, bus_url, RequestedChange("r", ME), "by me")
    assert written == [1, 2]


def test_a_run_that_was_stopped_and_starts_all_the_same_may_be_stopped_again(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def publish(*_: object, **__: object) -> None:
        raise redis.ConnectionError("gone")

    add_run(store, "r", node="n1")
    with monkeypatch.context() as away:
        away.setattr(stopping, "publish", publish)
        with pytest.raises(redis.ConnectionError):
            requests.stop(store, bus_url, RequestedChange("r", ME), "by me")
    assert runs.get(store, "r")["state"] == "stopped"
    telemetry.write(store, [("r", RunState(State.STARTING, 5.0, "n1"))])
    assert runs.get(store, "r")["state"] == "starting"
    requests.stop(store, bus_url, RequestedChange("r", ME), "by me")
    assert orders(bus_url) == [Kill("by me", 0)]


def test_a_stop_that_is_quicker_than_the_launch_ends_it(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Local.start

    def start(self: Local, bus: redis.Redis, run: str, new: NewRun, made: Credentials) -> None:
        requests.stop(store, bus_url, RequestedChange(run, ME), "by me")
        real(self, bus, run, new, made)

    monkeypatch.setattr(Local, "start", start)
    run = requests.launch(store, bus_url, NewRun("train", "train.py", 2, "bsp"), ME, start=True)
    assert [type(order) for order in orders(bus_url)] == [Kill, Launch, Kill]
    assert runs.get(store, run)["state"] == "stopped"


@pytest.mark.parametrize("change", ["resume", "stop"])
def test_what_worked_is_no_error_although_the_bus_goes_away(
    store: Store,
    bus_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: str,
) -> None:
    def publish(*_: object, **__: object) -> None:
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(streams, "publish", publish)
    if change == "resume":
        add_run(store, "r", node="n1", state="failed")
        requests.resume(store, bus_url, RequestedChange("r", ME), requests.Resumption(start=True))
        assert [type(order) for order in orders(bus_url)] == [Launch]
        assert "a change of run r could not be announced" in caplog.text
    else:
        add_run(store, "r")
        requests.stop(store, bus_url, RequestedChange("r", ME), "by me")
        assert runs.get(store, "r")["state"] == "stopped"
        assert (
            "run r has ended; open dashboard pages show it when the bus is back: gone"
            in caplog.text
        )


def test_a_resume_is_not_stored_if_earlier_orders_cannot_be_deleted(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(*_: object) -> None:
        raise redis.ConnectionError("gone")

    add_run(store, "r", node="n1", state="failed", message="as it was")
    monkeypatch.setattr(streams, "forget_orders", forget)
    with pytest.raises(redis.ConnectionError):
        requests.resume(store, bus_url, RequestedChange("r", ME), requests.Resumption(start=True))
    row = runs.get(store, "r")
    assert (row["state"], row["message"], row["revision"]) == ("failed", "as it was", 0)
