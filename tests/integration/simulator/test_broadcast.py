"""Simulations as runs of a control plane: real REST, bus, ingest and databases."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import msgspec
import pytest
import redis
import sqlalchemy as sa

from paceline.node.client import Client
from paceline.wire import (
    CHANGES,
    TELEMETRY,
    Committed,
    Plan,
    RoundRecord,
    control,
    decode,
    live,
)
from paceline.wire.bus import connect
from paceline_backend.control import ControllerManager
from paceline_backend.insight.replay import replay
from paceline_backend.simulator import Scenario, Simulation
from paceline_backend.simulator.broadcast import Broadcast, records, register, rounds
from paceline_backend.store import Store, blobs, coverage, schema, switches
from paceline_backend.store import runs as runs_store
from support.leading import ingest, planning, working
from support.waiting import until
from support.web import serving

PROBLEM = "application/problem+json"
STARTED = 1_800_000_000.0
PLAIN: dict[str, Any] = {
    "name": "small",
    "workers": 4,
    "global_batch": 16,
    "epochs": 2,
    "sizes": {"distribution": "lognormal", "mean": 45, "dif": 30, "samples": 300},
    "devices": {"unit_s": 1e-3, "step_s": 0.01, "noise": 0.05, "factors": [1, 1, 2, 3]},
    "communication": {"fixed_s": 0.02},
    "policy": "chronica",
    "failures": [{"rank": 3, "step": 7, "restart_s": 4}],
    "switches": [{"step": 20, "policy": "bsp"}],
}


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


@pytest.fixture
def sqlite(tmp_path: Any) -> Iterator[Store]:
    with Store.open(f"sqlite:///{tmp_path / 'one.db'}") as opened:
        yield opened


@contextmanager
def broadcasting(store: Store, bus_url: str, scenario: Scenario) -> Iterator[Any]:
    """The run's id, its broadcast, and a client of the server."""
    with ExitStack() as held:
        http: httpx.Client = held.enter_context(serving(store, bus_url))
        server = held.enter_context(Client(str(http.base_url)))
        bus: redis.Redis = held.enter_context(connect(bus_url))
        run = register(server, scenario, "small.yaml")
        yield run, Broadcast(Simulation.of(scenario), run, bus, server, STARTED), server


def stored_segments(store: Store, run: str) -> list[bytes]:
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
        c = schema.segments.c
        query = sa.select(c.body).where(c.run == key).order_by(c.attempt, c.seq)
        return list(connection.scalars(query))


def test_is_stored_as_it_was_simulated(store: Store, bus_url: str) -> None:
    """Byte by byte, with a failure and a switch; nobody else plans it; every sample once."""
    scenario = Scenario.of(PLAIN)
    alone = Simulation.of(scenario)
    expected = []
    while not alone.finished:
        expected.append(alone.advance())
    manager = ControllerManager(store, bus_url, "one")
    with (
        working(ingest(store, bus_url), planning(manager)),
        broadcasting(store, bus_url, scenario) as (run, broadcast, server),
    ):
        ran = [trained for trained, _ in broadcast.segments()]
        until(lambda: runs_store.get(store, run)["state"] == "finished", "its end in the database")
        shown = server.call("GET", f"/runs/{run}/scenario")
        with connect(bus_url) as bus:
            assert bus.xlen(control(run)) == 0, "a controller planned it"
            said = [decode(fields)[1] for _, fields in bus.xrange(live(run))]
            assert not any(isinstance(each, Committed) for each in said), "no controller hears it"
            noted = [fields.get(run.encode()) for _, fields in bus.xrange(CHANGES)]
    assert [blobs.pack(trained.plan) for trained in expected] == stored_segments(store, run)
    stored = runs_store.get(store, run)
    assert (stored["backend"], stored["attempt"], stored["world"]) == ("simulated", 1, 4)
    assert (stored["started_at"], stored["controller"]) == (STARTED, None)
    assert stored["ended_at"] == pytest.approx(STARTED + alone.now)
    assert stored["emulated"]["a_s"] == pytest.approx([1e-3, 1e-3, 2e-3, 3e-3])
    assert Scenario.of(shown) == scenario
    assert rows_of(store, run) == [row for trained in ran for row in rows_expected(trained)]
    with store.read() as connection:
        covered = coverage.coverage(connection, runs_store.key_of(connection, run))
    assert covered["exact"]
    assert [epoch["used"] for epoch in covered["epochs"]] == [300, 300]
    assert [(s["policy"], s["requested_by"]) for s in switches.rows(store, run)] == [
        ("chronica", "configured"),
        ("bsp", "configured"),
    ]
    assert replay(store, run).exact
    assert any(noted), "those who watch hear of new steps"


def rows_of(store: Store, run: str) -> list[tuple[Any, ...]]:
    c = schema.worker_steps.c
    names = ("step", "rank", "attempt", "seq", "compute_s", "sync_s", "ended_at", "ett_s")
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
        query = sa.select(*(c[name] for name in names)).where(c.run == key)
        return [tuple(row) for row in connection.execute(query.order_by(c.step, c.rank))]


def rows_expected(ran: Any) -> list[tuple[Any, ...]]:
    first_step = 7 if ran.attempt else 0
    table = records(ran, slice(0, len(ran.step_s)), first_step, STARTED)
    names = ("step", "rank", "attempt", "seq", "compute_s", "sync_s", "ended_at", "ett_s")
    return list(zip(*(table[name] for name in names), strict=True))


def test_rounds_are_stored_as_they_were_simulated(store: Store, bus_url: str) -> None:
    """Of each attempt from the first on; an operator may switch to a relaxed synchroniser, too."""
    relaxed = {**PLAIN, "epochs": 4, "policy": "backup-workers", "switches": []}
    scenario = Scenario.of(relaxed)
    with (
        working(ingest(store, bus_url)),
        broadcasting(store, bus_url, scenario) as (run, broadcast, server),
    ):
        server.call("POST", f"/runs/{run}/policy", {"policy": "rna"}, if_match="*")
        expected, seq = [], 0
        for ran, _ in broadcast.segments():
            seq = 0 if expected and expected[-1].attempt != ran.attempt else seq
            round_records = rounds(ran, seq, STARTED)
            seq += len(round_records)
            expected += round_records
        until(lambda: runs_store.get(store, run)["state"] == "finished", "its end in the database")
        summed = server.call("GET", f"/runs/{run}/synchronisation")
        covered = server.call("GET", f"/runs/{run}/coverage")
    c = schema.rounds.c
    fields = RoundRecord.__struct_fields__
    with store.read() as connection:
        query = sa.select(*(c[name] for name in fields)).order_by(c.attempt, c.seq)
        rows = [tuple(row) for row in connection.execute(query)]
    stored = [RoundRecord(**dict(zip(fields, row, strict=True))) for row in rows]
    counts = [blobs.unpack(record.staleness, list[int]) for record in stored]  # type: ignore[arg-type]
    assert counts == [record.staleness for record in expected]
    without = [msgspec.structs.replace(record, staleness=[]) for record in stored]
    assert without == [msgspec.structs.replace(record, staleness=[]) for record in expected]
    assert {record.attempt for record in expected} == {0, 1}
    assert {period["policy"] for period in summed["in_force"]} == {"rna"}
    assert sum(epoch["dropped"] for epoch in covered["epochs"]) == sum(
        record.dropped for record in expected
    )


def test_obeys_an_operator(sqlite: Store, bus_url: str) -> None:
    """A switch with parameters takes effect, another one too, then a stop ends it."""
    long = {**PLAIN, "epochs": 100_000, "failures": [], "switches": [], "policy": "bsp"}
    with (
        working(ingest(sqlite, bus_url)),
        broadcasting(sqlite, bus_url, Scenario.of(long)) as (run, broadcast, server),
    ):
        segments = (ran.plan for ran, _ in broadcast.segments())

        def follow(wanted: tuple[str, int]) -> Plan:
            return until(
                lambda: next(
                    (s for s in [next(segments)] if (s.policy, s.version) == wanted), None
                ),
                f"a segment of {wanted}",
            )

        follow(("bsp", 0))
        switch = {"policy": "chronica", "parameters": {"window": 16}, "by": "test"}
        server.call("POST", f"/runs/{run}/policy", switch, if_match="*")
        plan = follow(("chronica", 1))
        assert plan.shuffled
        server.call("POST", f"/runs/{run}/policy", {"policy": "bsp"}, if_match="*")
        follow(("bsp", 2))
        until(lambda: runs_store.get(sqlite, run)["state"] == "running", "it runs")
        server.call("POST", f"/runs/{run}/stop", if_match="*")
        for _ in segments:
            pass
        assert broadcast.state == "stopped"
        until(lambda: runs_store.get(sqlite, run)["state"] == "stopped", "it is stopped")
    effective = [s["effective_step"] for s in switches.rows(sqlite, run)]
    assert effective[:2] == [0, plan.first_step]


def test_never_outruns_ingest(sqlite: Store, bus_url: str) -> None:
    """Without ingest it waits, at a bounded length of the stream, and goes on with it."""
    room, per_segment = 10, 3  # messages
    scenario = Scenario.of({**PLAIN, "epochs": 10})
    with (
        broadcasting(sqlite, bus_url, scenario) as (run, broadcast, _),
        connect(bus_url) as bus,
    ):
        broadcast.waiting = 2_500
        done = threading.Event()
        lengths = []

        def work() -> None:
            for _ in broadcast.segments():
                lengths.append(int(bus.xlen(TELEMETRY)))  # type: ignore[arg-type]
            done.set()

        thread = threading.Thread(target=work)
        thread.start()
        with connect(bus_url) as watch:
            until(lambda: int(watch.xlen(TELEMETRY)) > room, "enough waits")  # type: ignore[arg-type]
        with working(ingest(sqlite, bus_url)):
            until(done.is_set, "it goes on")
            until(lambda: runs_store.get(sqlite, run)["state"] == "finished", "all is stored")
        thread.join()
    assert max(lengths) <= room + per_segment
    assert len(lengths) > 3 * room


def test_counts_records_that_wait(sqlite: Store, bus_url: str) -> None:
    """However many are in a message."""
    wide = {**PLAIN, "workers": 400, "global_batch": 400, "devices": {"unit_s": 1e-3}}
    scenario = Scenario.of({**wide, "epochs": 30, "failures": [], "switches": []})
    with broadcasting(sqlite, bus_url, scenario) as (_, broadcast, _), connect(bus_url) as bus:
        segments = broadcast.segments()
        trained = [next(segments)[0] for _ in range(3)]
        records = 400 * sum(len(ran.step_s) for ran in trained)
        others = int(bus.xlen(TELEMETRY)) - len(trained)  # type: ignore[arg-type]
        assert broadcast._on_the_bus() == records + 250 * others
        bus.xtrim(TELEMETRY, maxlen=1)
        assert broadcast._on_the_bus() == 400 * len(trained[-1].step_s)


class Away(httpx.HTTPTransport):
    """A server whose database is away at first."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.left = times

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self.left:
            return super().handle_request(request)
        self.left -= 1
        problem = {"status": 503, "detail": "the database does not answer; try again"}
        return httpx.Response(503, json=problem, headers={"content-type": PROBLEM})


def test_waits_out_a_server_that_cannot_work(sqlite: Store, bus_url: str) -> None:
    scenario = Scenario.of({**PLAIN, "failures": []})
    with (
        working(ingest(sqlite, bus_url)),
        broadcasting(sqlite, bus_url, scenario) as (run, broadcast, server),
    ):
        server.close()
        away = Away(2)
        with httpx.Client(base_url=server.server, transport=away) as server._http:
            for _ in broadcast.segments():
                pass
        assert away.left == 0
        until(lambda: runs_store.get(sqlite, run)["state"] == "finished", "all is stored")


def test_rest_refuses(sqlite: Store, bus_url: str) -> None:
    """What cannot be simulated leaves no run behind; the answer names the field."""
    body = {
        "script": "small.yaml",
        "nproc": 4,
        "launch": False,
        "backend": "simulated",
        "scenario": PLAIN,
    }
    cases: list[tuple[dict[str, Any], str]] = [
        ({"scenario": None}, "scenario: describe the simulation"),
        ({"scenario": {**PLAIN, "workers": -1}}, "scenario: workers"),
        ({"nproc": 3}, "nproc: 3, but the scenario has 4"),
        ({"launch": True}, "launch: give false"),
        ({"backend": "local"}, "scenario: only backend"),
    ]
    with serving(sqlite, bus_url) as client:
        for change, field in cases:
            answer = client.post("/api/v1/runs", json={**body, **change})
            assert answer.status_code == 422
            assert field in answer.json()["detail"]
        assert client.get("/api/v1/runs").json()["items"] == []
