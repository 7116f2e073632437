"""Requests that fail between the database and the bus: what is stored says what happened."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import redis

from paceline.wire import NodeState, RunChanged, decode, live
from paceline_backend import requests
from paceline_backend.backends.local import Local
from paceline_backend.requests import streams
from paceline_backend.store import Store, StoreUnavailableError, runs, telemetry
from paceline_backend.store.new_runs import NewRun
from support.records import add_run


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        node = NodeState("n1", "n1.local", 8, 2**30, [], time.time(), "0.1.0", [])
        telemetry.write(opened, [("", node)])
        yield opened


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (redis.ConnectionError("gone"), "the bus went away before its launch"),
        (redis.TimeoutError("slow"), "the bus went away before its launch"),
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
        requests.launch(store, bus_url, new, "me", start=True)
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
        requests.launch(store, bus_url, NewRun("train", "train.py", 2, "bsp"), "me", start=True)
    [row], _ = runs.page(store)
    assert f"run {row['id']} was not launched: it could not be launched: KeyError" in caplog.text


def test_text_that_no_message_holds_fails_the_run(store: Store, bus_url: str) -> None:
    new = NewRun("train", "train.py", 2, "bsp", env={"NAME": "\ud800"})
    with pytest.raises(UnicodeEncodeError):
        requests.launch(store, bus_url, new, "me", start=True)
    [row], _ = runs.page(store)
    assert row["state"] == "failed"
    assert "it could not be launched: UnicodeEncodeError" in row["message"]


def test_a_stop_that_is_stored_is_done_although_the_bus_goes_away(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def publish(*_: object, **__: object) -> None:
        raise redis.ConnectionError("gone")

    add_run(store, "r")
    monkeypatch.setattr(streams, "publish", publish)
    requests.stop(store, bus_url, "r", "by me")
    assert runs.get(store, "r")["state"] == "stopped"
    assert "run r has ended; open pages show it when the bus is back: gone" in caplog.text
