"""Users of the bus are kept as long as they are needed, and as the flood guard left them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa

from paceline.node.delivery import Delivery
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.node.session import BusSession
from paceline.node.spool import Spool
from paceline.wire import State, StepBatch, commands, encode, node_telemetry, run_telemetry
from paceline.wire.bus import as_user, connect
from paceline_backend.control.bus_users import UserReconciler
from paceline_backend.requests import sessions
from paceline_backend.server import floods, users
from paceline_backend.server.floods import Bounds, Guard
from paceline_backend.server.keys import Keys
from paceline_backend.store import Store, nodes, schema
from paceline_backend.store.audit import Requester
from paceline_backend.store.telemetry import writers
from support.records import add_run

AT_ONCE = Bounds(entries=2, bytes=2**30, off_s=0.0)


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        add_run(opened, "r", node="here")
        yield opened


@pytest.fixture
def bus(bus_url: str) -> Iterator[redis.Redis]:
    """A bus that forgets its users after the test."""
    with connect(bus_url) as client:
        yield client
        if made := users.names(client):
            client.execute_command("ACL", "DELUSER", *made)  # type: ignore[no-untyped-call]


def flood(bus: redis.Redis, stream: str) -> None:
    """Switches the stream's writer off."""
    for _ in range(3):
        bus.xadd(stream, {"data": "x"})
    assert stream in [each.stream for each in Guard(bus, AT_ONCE).look_at_all() if each.off]


def works(url: str, stream: str) -> bool:
    try:
        with connect(url) as client:
            return bool(client.xadd(stream, {"data": "x"}))
    except redis.AuthenticationError:
        return False


def test_who_is_off_stays_off(store: Store, bus: redis.Redis, bus_url: str) -> None:
    """Whoever asks for a session or keeps users makes them, but lets nobody back."""
    run, node = run_telemetry("r"), node_telemetry("here")
    sessions.of_run(store, bus_url, "r")
    sessions.of_node(store, bus_url, "here")
    for stream in (run, node):
        flood(bus, stream)
    urls = {
        run: sessions.of_run(store, bus_url, "r").bus,
        node: sessions.of_node(store, bus_url, "here").bus,
    }
    UserReconciler(store, bus_url).keep(bus)
    assert [works(url, stream) for stream, url in urls.items()] == [False, False]
    bus.delete(run, node)
    assert len(Guard(bus, AT_ONCE).switch_on()) == 2
    assert [works(url, stream) for stream, url in urls.items()] == [True, True]


def test_who_is_let_back_meanwhile_is_let_back(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard works between the maker's look and what the maker does."""
    stream = run_telemetry("r")
    url = sessions.of_run(store, bus_url, "r").bus
    flood(bus, stream)
    bus.delete(stream)
    real, did = users._make, []

    def slow(client: redis.Redis, pending: list[users.User], off: set[str]) -> str | None:
        if not did:
            did.append(Guard(bus, AT_ONCE).switch_on())
        return real(client, pending, off)

    monkeypatch.setattr(users, "_make", slow)
    sessions.of_run(store, bus_url, "r")
    assert did == [["paceline-run-r"]]
    assert works(url, stream)
    assert not bus.exists(floods.OFF)


def test_a_nodes_user_may_drain_a_spool(
    store: Store, bus: redis.Redis, bus_url: str, tmp_path: Path
) -> None:
    given = sessions.of_node(store, bus_url, "here")
    session = BusSession("id", given.bus, node_telemetry("here"), commands("here"), given.key)
    out = Spool(tmp_path / "r" / "spool", "rank0", 1 << 20)
    out.append(encode(StepBatch([]), "r"))
    out.close()
    with Link(session) as link:
        delivery = Delivery(tmp_path / "r", Record("r", "here", "the agent", "id"), link)
        delivery.report(State.FINISHED)
        assert delivery.settled
        delivery.close()
    assert bus.xlen(node_telemetry("here")) == 2


def end(store: Store, *, lost: bool, ago_s: float) -> None:
    with store.write() as connection:
        over = {"state": "failed", "lost": lost, "seen_at": time.time() - ago_s}
        connection.execute(sa.update(schema.runs).values(over))


def test_a_run_that_may_still_train_keeps_its_user(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Nothing was heard of it, for example because its node was cut off."""
    url = sessions.of_run(store, bus_url, "r").bus
    end(store, lost=True, ago_s=86_400)
    keeper = UserReconciler(store, bus_url)
    for _ in range(2):
        keeper.keep(bus)
    assert works(url, run_telemetry("r"))
    end(store, lost=True, ago_s=60 * 86_400)
    keeper.keep(bus)
    assert not works(url, run_telemetry("r"))


def test_a_run_that_gets_its_user_meanwhile_keeps_it(
    store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets a session after the keeper has read the database, and before it looks at the bus."""
    sessions.of_run(store, bus_url, "r")
    add_run(store, "late", node="here")
    keeper = UserReconciler(store, bus_url)
    keeper.keep(bus)
    real, urls = writers.signed_runs, []

    def slow(connection: sa.Connection) -> list[str]:
        known = real(connection)
        if not urls:
            connection.rollback()
            urls.append(sessions.of_run(store, bus_url, "late").bus)
        return known

    monkeypatch.setattr(writers, "signed_runs", slow)
    keeper.keep(bus)
    assert works(urls[0], run_telemetry("late"))


def test_the_stream_of_a_run_that_is_over_goes(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Also if the run ended while no worker looked, and unless the run goes on."""
    stream = run_telemetry("r")
    sessions.of_run(store, bus_url, "r")
    for other in (stream, run_telemetry("another-server-s")):
        bus.xadd(other, {"data": "x"})
    keeper = UserReconciler(store, bus_url)
    keeper.keep(bus)
    assert bus.ttl(stream) == -1
    end(store, lost=False, ago_s=86_400)
    keeper.keep(bus)
    assert 0 < bus.ttl(stream) <= 3_600
    end(store, lost=False, ago_s=0)
    keeper.keep(bus)
    assert bus.ttl(stream) == -1
    end(store, lost=False, ago_s=86_400)
    UserReconciler(store, bus_url).keep(bus)
    assert 0 < bus.ttl(stream) <= 3_600
    assert bus.ttl(run_telemetry("another-server-s")) == -1


RIGHTS = ("acl|setuser", "acl|getuser", "acl|users", "acl|deluser", "client|kill")


@pytest.fixture
def poor(bus: redis.Redis, bus_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a user who has the rights that the documents ask for, but for one."""
    rights = [f"+{each}" for each in RIGHTS if each != request.param]
    rules = ["reset", "on", ">pw", "~*", "&*", "+@all", "-@admin", "-@dangerous", *rights]
    bus.execute_command("ACL", "SETUSER", "poor", *rules)  # type: ignore[no-untyped-call]
    yield as_user(bus_url, "poor", "pw")
    bus.execute_command("ACL", "DELUSER", "poor")  # type: ignore[no-untyped-call]


def test_the_documents_name_the_rights() -> None:
    text = (Path(__file__).parents[3] / "docs/deploying.md").read_text()
    for right in RIGHTS:
        name = right.upper().replace("|", " ")
        assert name in users.RIGHTS
        assert f"`{name}`" in text


@pytest.mark.parametrize(
    "poor", ["none", "acl|setuser", "acl|getuser", "client|kill"], indirect=True
)
def test_a_right_that_is_missing_leaves_all_as_it_was(
    bus: redis.Redis, bus_url: str, poor: str, request: pytest.FixtureRequest
) -> None:
    """A thief with the old password is out, or the bus counts as one that makes no users."""
    first, second = (users.of_node(Keys(b"k" * 32, {"n": seed}), "n") for seed in "ab")
    assert users.make(bus, [first]) is None
    with connect(poor) as client, connect(first.url(bus_url)) as thief:
        assert thief.ping()
        reason = users.make(client, [second])
        if reason is None:
            with pytest.raises(redis.RedisError):
                thief.ping()
            assert works(second.url(bus_url), node_telemetry("n"))
        else:
            assert "permissions" in reason
            assert thief.ping()
    assert (reason is None) == (request.node.callspec.params["poor"] == "none")
    assert works(first.url(bus_url), node_telemetry("n")) == (reason is not None)


def test_a_bus_that_hangs_does_not_hold_the_database(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a node is forgotten."""
    sessions.of_node(store, bus_url, "here")
    with store.write() as connection:
        connection.execute(sa.update(schema.nodes).values(heartbeat_at=1.0))
        connection.execute(sa.update(schema.runs).values(state="finished"))

    def hanging(client: redis.Redis, names: Iterable[str]) -> None:
        with store.write() as connection:  # another request, or ingest
            connection.execute(sa.update(schema.runs).values(name="written meanwhile"))
        raise redis.TimeoutError

    real = users.forget
    monkeypatch.setattr(users, "forget", hanging)
    with pytest.raises(redis.TimeoutError):
        sessions.forget(store, bus_url, "here", Requester("me"))
    with store.read() as connection:
        assert nodes.registered(connection, ["here"]) == {"here"}
    monkeypatch.setattr(users, "forget", real)
    sessions.forget(store, bus_url, "here", Requester("me"))
    with store.read() as connection:
        assert nodes.registered(connection, ["here"]) == set()
