"""A thief has the PACELINE_BUS of one run, and wants more."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec
import numpy as np
import pytest
import redis

from paceline.wire import (
    Kill,
    Plan,
    Proposal,
    StopTraining,
    answers,
    commands,
    control,
    encode,
    node_telemetry,
    run_telemetry,
    signed,
)
from paceline.wire.bus import connect, publish
from paceline_backend.control.bus_users import UserReconciler
from paceline_backend.control.periodic import Periodic
from paceline_backend.requests import ConflictError, sessions
from paceline_backend.server import users
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, meta, runs
from support.leading import Leading
from support.records import add_run
from support.waiting import until


@pytest.fixture
def store(store: Store) -> Store:
    add_run(store, "mine", node="here")
    add_run(store, "theirs", node="there")
    return store


@pytest.fixture
def own_bus(tmp_path: Path) -> Iterator[EmbeddedBus]:
    """A server whose users this test may change."""
    with EmbeddedBus(tmp_path / "bus") as server:
        yield server


@pytest.fixture
def plain_url(own_bus: EmbeddedBus) -> str:
    """The URL of a bus on which the control plane may make no users."""
    rules = ("reset", "on", ">app", "~*", "&*", "+@all", "-acl")
    with connect(own_bus.url) as client:
        client.execute_command("ACL", "SETUSER", "app", *rules)
    return f"redis://app:app@127.0.0.1:{own_bus.port}/0"


def test_a_node_reaches_its_own_streams_only(store: Store, own_bus: EmbeddedBus) -> None:
    session = sessions.of_node(store, own_bus.url, "here")
    with connect(session.bus) as thief:
        assert thief.xadd(node_telemetry("here"), {"v": "1"})
        assert thief.xadd(answers("here", "0" * 32), {"v": "1"})
        assert thief.xread({commands("here"): "0"}, block=1) == []
        others = (node_telemetry("there"), answers("there", "0" * 32), commands("here"))
        for stream in (*others, control("mine")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                thief.xadd(stream, {"v": "1"})
        with pytest.raises(redis.exceptions.NoPermissionError):
            thief.xread({answers("here", "0" * 32): "0"})


@pytest.mark.parametrize("name", ["", "-x", "../x", "a b", "a*", "x" * 201, "é"])
def test_a_node_has_no_name_with_a_meaning(name: str, store: Store, own_bus: EmbeddedBus) -> None:
    with pytest.raises(sessions.InvalidRequestError):
        sessions.of_node(store, own_bus.url, name)


def leading(bus_url: str, key: bytes) -> Leading:
    sizes, speeds = np.ones(400), np.array([1e-3, 1e-3])
    return Leading(bus_url, "mine", sizes, speeds, global_batch=8, key=key)


def forgeries(store: Store, leader: Leading) -> Iterator[dict[bytes, bytes]]:
    """Plans that fit, without a MAC, or with one of another key, stream or run."""
    keys = Keys(meta.secret(store))
    leader.coast(1)
    plan = Proposal(0, following(leader), "thief")
    fields = encode(plan, "mine")
    yield fields
    yield fields | {b"mac": b"\0" * 32}
    yield signed(fields, control("mine"), keys.of_run("theirs"))
    yield signed(fields, control("theirs"), keys.of_run("mine"))
    yield signed(encode(plan, "theirs"), control("mine"), keys.of_run("theirs"))


def following(leader: Leading) -> Plan:
    """A plan of the next segment that fits."""
    plan = leader.segments[-1]
    used = np.concatenate([np.frombuffer(s.indices, "<u4") for s in leader.segments])
    rest = np.setdiff1d(np.arange(400), used)[: len(plan.indices) // 4]
    return msgspec.structs.replace(
        plan,
        seq=plan.seq + 1,
        first_step=plan.first_step + plan.steps,
        indices=rest.astype("<u4").tobytes(),
        source="controller",
    )


@pytest.mark.parametrize("with_users", [True, False], ids=["users", "no-users"])
def test_no_forged_plan_is_adopted(
    with_users: bool,
    store: Store,
    own_bus: EmbeddedBus,
    plain_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = own_bus.url if with_users else plain_url
    monkeypatch.setenv(users.SHARE, "1")
    session = sessions.of_run(store, url, "mine")
    assert (session.bus == url) is not with_users
    sent = 0
    with leading(session.bus, session.key) as leader, connect(session.bus) as thief:
        while sent < 100:
            for fields in itertools.islice(forgeries(store, leader), 100 - sent):
                sent += 1
                try:
                    thief.xadd(control("mine"), dict(fields.items()))
                except redis.exceptions.NoPermissionError:
                    assert with_users
        if not with_users:
            until(lambda: leader.control.refused == 100, "the leader to hear all")
        assert leader.heard.received == 0
        assert {segment.source for segment in leader.segments} == {"coast"}
        with connect(own_bus.url) as server:  # what the control plane says, the leader hears
            plan = Proposal(0, following(leader), "the controller")
            publish(server, control("mine"), plan, "mine", key=session.key)
        until(lambda: leader.heard.received == 1, "the true plan to be heard")
        assert leader.adopt().source == "controller"


def test_a_stop_is_signed(store: Store, plain_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(users.SHARE, "1")
    session = sessions.of_run(store, plain_url, "mine")
    with leading(plain_url, session.key) as leader, connect(plain_url) as thief:
        publish(thief, control("mine"), StopTraining("ha", 0), "mine")
        publish(thief, control("mine"), Kill("ha", 0), "mine")
        until(lambda: leader.control.refused == 2, "both to be refused")
        assert leader.heard.stop_reason is None


def keeping(store: Store, url: str) -> tuple[threading.Thread, threading.Event]:
    stop = threading.Event()
    repeated = Periodic("bus users", 0.1, partial(UserReconciler(store, url).look, connect(url)))
    thread = threading.Thread(target=repeated.run, args=[stop])
    thread.start()
    return thread, stop


def works(url: str, stream: str) -> bool:
    try:
        with connect(url) as client:
            return bool(client.xadd(stream, {"v": "1"}))
    except redis.RedisError:
        return False


def test_users_are_made_again(store: Store, own_bus: EmbeddedBus) -> None:
    run = sessions.of_run(store, own_bus.url, "mine")
    node = sessions.of_node(store, own_bus.url, "here")
    thread, stop = keeping(store, own_bus.url)
    try:
        with connect(own_bus.url) as server:
            server.flushall()
        assert works(run.bus, run_telemetry("mine")), "FLUSHALL leaves users alone"
        own_bus.kill()
        own_bus.start()
        until(lambda: works(run.bus, run_telemetry("mine")), "the run's user")
        until(lambda: works(node.bus, node_telemetry("here")), "the node's user")
        assert sessions.of_run(store, own_bus.url, "mine") == run, "nothing is stored of it"
    finally:
        stop.set()
        thread.join()


def test_users_of_runs_that_are_over_go(store: Store, own_bus: EmbeddedBus) -> None:
    session = sessions.of_run(store, own_bus.url, "mine")
    sessions.of_run(store, own_bus.url, "theirs")
    keeper = UserReconciler(store, own_bus.url)
    with connect(own_bus.url) as server:
        keeper.keep(server)
        with store.write() as connection:  # created long ago, and never seen
            runs.end(connection, "mine", "failed", "over")
        server.execute_command("ACL", "SETUSER", "paceline-run-another-server-s")
        keeper.keep(server)
        known = users.names(server)
    assert known == {"paceline-run-theirs", "paceline-run-another-server-s"}
    assert not works(session.bus, run_telemetry("mine"))


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "not-shared"])
def test_a_bus_without_users_for_us_is_told_once(
    store: Store,
    plain_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    shared: bool,
) -> None:
    """Its own password is given to nobody, unless the server was started with an option."""
    if shared:
        monkeypatch.setenv(users.SHARE, "1")
        assert sessions.of_node(store, plain_url, "here").bus == plain_url
        assert sessions.of_run(store, plain_url, "mine").bus == plain_url
    else:
        for asked in (
            lambda: sessions.of_node(store, plain_url, "here"),
            lambda: sessions.of_run(store, plain_url, "mine"),
            lambda: sessions.credentials(store, plain_url, "mine"),
        ):
            with pytest.raises(ConflictError, match="--share-bus-password") as refused:
                asked()
            assert "app:app" not in str(refused.value)
    keeper = UserReconciler(store, plain_url)
    with connect(plain_url) as client, caplog.at_level(logging.WARNING):
        for _ in range(3):
            keeper.keep(client)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "ACL SETUSER" in warning
    assert "(User app has no permissions to run the 'acl|getuser' command)" in warning
    assert ("get no credentials" in warning) is not shared


def test_a_bus_without_a_password_is_told_once(
    store: Store, own_bus: EmbeddedBus, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), connect(own_bus.url) as server:
        UserReconciler(store, own_bus.url).try_door()
        assert not caplog.records
        server.execute_command("ACL", "SETUSER", "default", "nopass")
        keeper = UserReconciler(store, own_bus.url)
        for _ in range(3):
            keeper.try_door()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "requirepass" in warning


def test_secrets_are_not_shown(store: Store, own_bus: EmbeddedBus) -> None:
    session = sessions.of_run(store, own_bus.url, "mine")
    keys = Keys(meta.secret(store))
    shown = repr((session, keys, users.of_run(keys, "mine")))
    for secret in (session.bus, session.key.hex(), repr(session.key), keys.run_password("mine")):
        assert secret not in shown
        assert quote(secret) not in shown
