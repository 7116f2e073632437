"""Runs on an engine against its jobs: what a worker does, whenever another was killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace as replaced
from functools import partial
from typing import Any

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import Kill, Launch, State
from paceline_backend import requests
from paceline_backend.backends import EngineAwayError, Job, Order
from paceline_backend.control import leases
from paceline_backend.control.engines import claims
from paceline_backend.control.engines.engine_jobs import telling
from paceline_backend.control.engines.engines import Engines
from paceline_backend.control.meetings import Meetings
from paceline_backend.control.periodic import Periodic
from paceline_backend.control.silence import SILENT_S
from paceline_backend.requests import (
    ConflictError,
    Resumption,
    enlist,
    join,
    leave,
    resume,
    spares,
    stop,
)
from paceline_backend.requests.replacing import NodeReplacement, replace
from paceline_backend.store import Store, nodes, runs, schema, telemetry
from paceline_backend.store import leases as stored_leases
from paceline_backend.store.access import tokens
from paceline_backend.store.audit import RequestedChange
from paceline_backend.store.jobs import EngineRun
from paceline_backend.store.new_runs import NewRun
from support.engine import TableEngine, become, table_engine
from support.groups import GONE, ME, answer, orders, ready, report, states
from support.looks import Looks
from support.waiting import DEADLINE_S, until


class Clock:
    """Time that a test sets."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[TableEngine]]:
    monkeypatch.setattr(nodes, "ALIVE_S", 3600)  # the machine may be busy
    with table_engine() as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(store: Store, bus_url: str, clock: Clock, engine: object) -> Engines:
    return Engines(store, "worker", clock=clock)


def begin(store: Store, bus_url: str, least: int = 1, most: int = 1) -> str:
    fields: dict[str, Any] = {"nodes_min": least, "nodes_max": most, "backend": "table"}
    new = NewRun("r", "/shared/train.py", 1, "bsp", server="http://head:1", **fields)
    return requests.launch(store, bus_url, new, ME, start=True)


def come(store: Store, bus_url: str, run: str, *names: str) -> None:
    """Nodes of the engine take part."""
    answer(store, *names, run=run)
    for name in names:
        assert enlist(store, bus_url, run, name).needed


def after(
    worker: Engines, bus: redis.Redis, clock: Clock, seconds: float, every_s: float = 1.0
) -> None:
    """Looks every second, or less often, until so much time is over."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now += every_s
        worker.look(bus)


def shown(store: Store, run: str) -> tuple[str, str | None]:
    known = runs.get(store, run)
    return known["state"], known["message"]


def valid(store: Store, run: str) -> int:
    """How many tokens of a run are worth something."""
    with store.read() as connection:
        known = tokens.listed(connection)
    return sum(token["run"] == run and token["revoked_at"] is None for token in known)


def test_a_run_is_submitted_once_and_waits(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    run = begin(store, bus_url, 2, 3)
    assert shown(store, run) == ("pending", None)
    after(worker, bus, clock, 60)
    [order] = TableEngine.orders
    assert (order.nodes, order.run, order.server) == (2, run, "http://head:1")
    assert shown(store, run) == ("queued", "waits as job 1 of Table: Resources")
    assert runs.get(store, run)["backend_jobs"] == {"launch": 0, "jobs": {"0": "1", "1": None}}
    become("1", "running")
    after(worker, bus, clock, 60)
    assert shown(store, run) == ("queued", "waits for the nodes of job 1 of Table")
    assert [order.nodes for order in TableEngine.orders] == [2, 1]
    assert len({order.label for order in TableEngine.orders}) == 2


def test_another_worker_goes_on_where_the_first_was_killed(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    """It had submitted the job, perhaps twice, and noted nothing."""
    run = begin(store, bus_url)
    worker._attendant._note = lambda *_: None  # type: ignore[method-assign]
    worker.look(bus)
    first = TableEngine.orders[0]
    TableEngine.submit(TableEngine(), first)
    after(Engines(store, "worker", clock=clock), bus, clock, 10)
    assert runs.get(store, run)["backend_jobs"]["jobs"] == {"0": "1"}
    assert [job.state for job in TableEngine.jobs.values()] == ["queued", "ended"]
    assert len({order.token for order in TableEngine.orders}) == 1


def test_two_workers_do_not_submit_a_run_twice(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    run = begin(store, bus_url)
    with store.read() as connection:
        key = runs.key_of(connection, run)
    assert leases.acquire(store, key, "other", 600, "jobs") is not None
    after(worker, bus, clock, 20)
    assert TableEngine.orders == []
    after(Engines(store, "other", clock=clock), bus, clock, 2)
    assert len(TableEngine.orders) == 1


def test_a_worker_that_is_slow_submits_nothing_twice(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has asked the engine, and then another worker submits the job and is killed."""
    run = begin(store, bus_url)
    with store.read() as connection:
        key = runs.key_of(connection, run)
    other = Engines(store, "other", clock=clock)
    other._attendant._note = lambda *_: None  # type: ignore[method-assign]
    assert leases.acquire(store, key, "other", 600, "jobs") is not None
    ask = TableEngine.look

    def slowly(self: TableEngine, prefix: str) -> Sequence[Job]:
        monkeypatch.setattr(TableEngine, "look", ask)
        known = ask(self, prefix)
        other.look(bus)
        stored_leases.release(store, key, "other", "jobs")  # as if it had expired
        return known

    monkeypatch.setattr(TableEngine, "look", slowly)
    after(worker, bus, clock, 8)
    assert len(TableEngine.orders) == 1
    assert runs.get(store, run)["backend_jobs"]["jobs"] == {"0": "1"}


def test_a_controller_that_ends_leaves_no_hole(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same worker plans the run, and no longer does while the engine takes its job."""
    run = begin(store, bus_url)
    with store.read() as connection:
        key = runs.key_of(connection, run)
    submit = TableEngine.submit

    def slowly(self: TableEngine, order: Order) -> str:
        monkeypatch.setattr(TableEngine, "submit", submit)
        plans = leases.acquire(store, key, "worker", 3)
        assert plans is not None
        leases.release(store, plans)
        Engines(store, "other", clock=clock).look(bus)
        return submit(self, order)

    monkeypatch.setattr(TableEngine, "submit", slowly)
    worker.look(bus)
    assert len(TableEngine.orders) == 1


def test_a_claim_lasts_as_long_as_the_engine_takes(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    engine: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Longer than a lease does; and a worker that ends leaves none."""
    monkeypatch.setattr(claims, "LEASE_S", 0.5)
    begin(store, bus_url)
    submit, stop_worker, others = TableEngine.submit, threading.Event(), []

    def owned() -> list[tuple[str, float]]:
        with store.read() as connection:
            query = sa.select(schema.engine_leases.c.owner, schema.engine_leases.c.expires_at)
            return [(row.owner, row.expires_at) for row in connection.execute(query)]

    def slowly(self: TableEngine, order: Order) -> str:
        [(_, expires_at)] = owned()
        until(lambda: owned()[0][1] > expires_at + 1, "a claim that was prolonged")
        others.extend(owner for owner, _ in owned())
        stop_worker.set()
        return submit(self, order)

    monkeypatch.setattr(TableEngine, "submit", slowly)
    engines = Engines(store, "worker")
    parts = [
        Periodic("engines", 0.1, partial(engines.look, bus), engines.end),
        Periodic("claims", claims.LEASE_S / 3, engines.keep_claims),
    ]
    threads = [threading.Thread(target=part.run, args=(stop_worker,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert others == ["worker"]
    assert len(TableEngine.orders) == 1
    assert owned() == []


def test_a_run_that_was_stopped_meanwhile_is_not_submitted(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = begin(store, bus_url)
    ask = TableEngine.look

    def slowly(self: TableEngine, prefix: str) -> Sequence[Job]:
        monkeypatch.setattr(TableEngine, "look", ask)
        stop(store, bus_url, RequestedChange(run, ME), "stopped")
        return ask(self, prefix)

    monkeypatch.setattr(TableEngine, "look", slowly)
    after(worker, bus, clock, 8)
    assert TableEngine.orders == []


def test_nothing_is_over_while_another_worker_may_submit(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    """Else a job that comes late would belong to a run that nobody looks after any more."""
    run = begin(store, bus_url)
    worker.look(bus)
    stop(store, bus_url, RequestedChange(run, ME), "stopped")
    after(worker, bus, clock, 4)
    with store.read() as connection:
        key = runs.key_of(connection, run)
    worker._claims.give_back()
    assert leases.acquire(store, key, "other", 600, "jobs") is not None
    become("1", "ended")
    after(worker, bus, clock, 8)
    assert valid(store, run) == 1
    stored_leases.release(store, key, "other", "jobs")
    after(worker, bus, clock, 4)
    assert valid(store, run) == 0


def test_nodes_are_launched_when_all_of_the_first_job_are_there(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    """An engine that gives some earlier than others says that the job waits."""
    run = begin(store, bus_url, 2, 2)
    worker.look(bus)
    come(store, bus_url, run, "n1")
    after(worker, bus, clock, 3600, every_s=60)
    assert orders(bus, "n1") == []
    assert shown(store, run) == ("queued", "waits as job 1 of Table: Resources")
    become("1", "running")
    after(worker, bus, clock, 4)
    come(store, bus_url, run, "n1", "n2")
    assert [isinstance(order, Launch) for node in ("n1", "n2") for order in orders(bus, node)] == [
        True,
        True,
    ]


def test_nodes_are_launched_at_once_when_all_have_come(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines
) -> None:
    """Before the engine was asked again, which calls the job queued. Earlier nodes do not count."""
    run = begin(store, bus_url, 2, 2)
    worker.look(bus)
    come(store, bus_url, run, "n1")
    assert orders(bus, "n1") == []
    come(store, bus_url, run, "n2")
    come(store, bus_url, run, "n1")
    assert [isinstance(order, Launch) for node in ("n1", "n2") for order in orders(bus, node)] == [
        True,
        True,
    ]
    for node in ("n1", "n2"):
        report(store, run, node, State.FAILED)
    resume(store, bus_url, RequestedChange(run, ME), Resumption(start=True))
    come(store, bus_url, run, "n3")
    assert orders(bus, "n3") == []


def test_what_the_engine_refuses_fails_the_run(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines
) -> None:
    TableEngine.refuses = "no such partition"
    run = begin(store, bus_url)
    worker.look(bus)
    assert shown(store, run) == ("failed", "Table refuses the job: no such partition")


def test_nothing_fails_while_the_engine_is_away(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    waits, trains = begin(store, bus_url), begin(store, bus_url)
    worker.look(bus)
    become("2", "running")
    come(store, bus_url, trains, "n1")
    report(store, trains, "n1", State.RUNNING)
    TableEngine.away = True
    with pytest.raises(EngineAwayError):
        TableEngine().look("")
    after(worker, bus, clock, 3600, every_s=60)
    assert shown(store, waits) == ("queued", "Table does not answer: no route")
    assert shown(store, trains) == ("running", None)
    TableEngine.away = False
    worker._outages.clear()  # its pauses are of real time
    after(worker, bus, clock, 4)
    assert shown(store, waits) == ("queued", "waits as job 1 of Table: Resources")


def test_a_run_that_waits_is_not_lost(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    run = begin(store, bus_url)
    looks = Looks(store, bus_url)
    for _ in range(3):
        clock.now += 2 * SILENT_S
        assert looks.after(2 * SILENT_S) == []
        worker.look(bus)
    assert shown(store, run)[0] == "queued"


def test_a_job_that_is_gone_fails_its_run(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    run = begin(store, bus_url)
    worker.look(bus)
    become("1", "running")
    come(store, bus_url, run, "n1")
    report(store, run, "n1", State.RUNNING)
    become("1", "ended", "TIMEOUT (TimeLimit)")
    after(worker, bus, clock, 4)
    assert shown(store, run)[0] == "running"  # what the node reported may be on its way
    after(worker, bus, clock, 7)
    why = "job 1 of Table ended before the run did: TIMEOUT (TimeLimit)"
    assert shown(store, run) == ("failed", why)
    assert valid(store, run) == 1
    after(worker, bus, clock, 4)
    assert valid(store, run) == 0
    report(store, run, "n1", State.FINISHED, exit_code=0)  # it knows better
    assert shown(store, run)[0] == "finished"


def test_a_job_that_somebody_ends_says_so(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    """Not where the script failed, and not where somebody stopped the run."""
    ends = {"n1": State.STOPPED, "n2": State.FAILED, "n3": State.STOPPED}
    of_node = {node: begin(store, bus_url) for node in ends}
    worker.look(bus)
    for number, (node, run) in enumerate(of_node.items(), 1):
        become(str(number), "running")
        come(store, bus_url, run, node)
        report(store, run, node, State.RUNNING)
    stop(store, bus_url, RequestedChange(of_node["n3"], ME), "stopped", force=True)
    for number, (node, run) in enumerate(of_node.items(), 1):
        code = 1 if ends[node] is State.FAILED else None
        report(store, run, node, ends[node], message="the end", exit_code=code)
        become(str(number), "ended", "CANCELLED")
    after(worker, bus, clock, 8)
    assert [shown(store, run) for run in of_node.values()] == [
        ("stopped", "the end; job 1 of Table ended: CANCELLED"),
        ("failed", "the end"),
        ("stopped", "the end"),
    ]


@pytest.mark.parametrize("first", ["the engine", "silence"])
def test_a_run_whose_job_somebody_cancels_is_stopped(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock, first: str
) -> None:
    """Its nodes were killed before they could say so: whoever notices that first."""
    run = begin(store, bus_url, 1, 2)
    worker.look(bus)
    become("1", "running")
    come(store, bus_url, run, "n1")
    report(store, run, "n1", State.RUNNING)
    after(worker, bus, clock, 4)
    become("1", "ended", "CANCELLED")
    become("2", "ended", "CANCELLED")
    if first == "silence":
        with store.write() as connection:
            telemetry.lose(connection, run, "n1", "its agent does not answer")
        assert shown(store, run) == ("failed", "n1: its agent does not answer")
    after(worker, bus, clock, 12)
    state, message = shown(store, run)
    assert state == "stopped"
    assert "job 1 of Table ended" in str(message)
    assert "CANCELLED" in str(message)
    report(store, run, "n1", State.RUNNING, at=clock.now)  # it was only cut off
    assert shown(store, run)[0] == "running"


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("goes_on", ["this worker", "another"])
def test_a_job_that_the_control_plane_ends_was_cancelled_by_nobody(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    goes_on: str,
    keeps: bool,
) -> None:
    monkeypatch.setattr(TableEngine, "keeps_ended", keeps)
    run = begin(store, bus_url)
    worker.look(bus)
    become("1", "running")
    come(store, bus_url, run, "n1")
    report(store, run, "n1", State.RUNNING)
    after(worker, bus, clock, 4)
    with store.write() as connection:
        assert runs.end(connection, run, State.FAILED, "it is lost", lost=True)
    for _ in range(60):
        if TableEngine.jobs["1"].state == "running":
            after(worker, bus, clock, 1)
    assert TableEngine.jobs["1"].cancelled
    if keeps:
        TableEngine.jobs.clear()
    if goes_on == "another":  # the first one was killed: whether it ended the job is not known
        worker = Engines(store, "worker", clock=clock)
    after(worker, bus, clock, 8)
    words = "it is lost" + ("" if keeps else "; job 1 of Table ended: CANCELLED")
    assert shown(store, run) == ("failed", words)
    assert valid(store, run) == 0


def test_a_job_that_cannot_be_submitted_holds_up_no_node(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes that a run needs are there, and the engine does not take the job of a further."""
    run = begin(store, bus_url, 2, 3)
    worker.look(bus)
    become("1", "running")

    def full(self: TableEngine, order: Order) -> str:
        raise EngineAwayError("too many jobs")

    monkeypatch.setattr(TableEngine, "submit", full)
    after(worker, bus, clock, 12)
    assert runs.get(store, run)["backend_jobs"]["begun"] == ["0"]


ENDED = Job("r.0", "1", "ended", "COMPLETED"), Job("r.1", "2", "ended", "OUT_OF_MEMORY")
TWO = EngineRun(
    key=1,
    id="r",
    state="running",
    backend="table",
    options={},
    launch=0,
    jobs={"0": "1", "1": "2"},
    replaces={},
    begun=["0", "1"],
    nodes_min=1,
    nodes_max=2,
    nproc=1,
    script="/shared/train.py",
    cwd=None,
    message=None,
    seen_at=None,
)


@pytest.mark.parametrize(
    ("known", "last", "ref", "cancelled"),
    [
        ({"1": ENDED[1]}, ["1"], "2", False),  # the engine has forgotten the first, which had left
        ({"0": ENDED[0], "1": ENDED[1]}, ["1"], "2", False),
        ({"0": ENDED[0], "1": replaced(ENDED[1], cancelled=True)}, ["1"], "2", True),
        ({"0": ENDED[0], "1": replaced(ENDED[1], cancelled=True)}, ["0"], "1", False),
        ({"0": ENDED[0], "1": replaced(ENDED[1], cancelled=True)}, [], "1", False),
        ({"0": ENDED[0]}, ["1"], "2", True),  # it is removed
        ({}, ["0", "1"], "1", True),
    ],
)
def test_the_jobs_that_were_there_last_tell_how_a_run_ended(
    engine: type[TableEngine],
    monkeypatch: pytest.MonkeyPatch,
    known: dict[str, Job],
    last: list[str],
    ref: str,
    cancelled: bool,
) -> None:
    monkeypatch.setattr(TableEngine, "keeps_ended", True)
    job = telling(TableEngine(), TWO, known, last)
    assert job is not None
    assert (job.ref, job.cancelled) == (ref, cancelled)


def test_a_job_that_somebody_removed(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From an engine that keeps ended jobs for long."""
    monkeypatch.setattr(TableEngine, "keeps_ended", True)
    waits, trains = begin(store, bus_url), begin(store, bus_url)
    worker.look(bus)
    become("2", "running")
    come(store, bus_url, trains, "n1")
    report(store, trains, "n1", State.RUNNING)
    after(worker, bus, clock, 4)
    TableEngine.jobs.clear()
    with store.write() as connection:
        assert runs.end(connection, trains, State.FAILED, "n1 is lost", lost=True)
    after(worker, bus, clock, 12)
    why = "job 1 of Table ended before the run did: it was removed"
    assert shown(store, waits) == ("stopped", why)
    why = "n1 is lost; job 2 of Table ended: it was removed"
    assert shown(store, trains) == ("stopped", why)


def test_jobs_that_the_engine_has_forgotten(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    run = begin(store, bus_url)
    worker.look(bus)
    TableEngine.jobs.clear()
    after(worker, bus, clock, 12)
    assert shown(store, run) == ("failed", "Table no longer lists the run's jobs: 1")
    assert len(TableEngine.orders) == 1


def test_jobs_of_a_stopped_run_are_stopped(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    waits, begins = begin(store, bus_url), begin(store, bus_url)
    worker.look(bus)
    become("2", "running")
    come(store, bus_url, begins, "n1")
    for run in (waits, begins):
        stop(store, bus_url, RequestedChange(run, ME), "stopped")
        assert shown(store, run)[0] == "stopped"
    assert any(isinstance(order, Kill) for order in orders(bus, "n1"))
    after(worker, bus, clock, 4)
    # A node may have something to deliver, and goes by itself.
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "running"]
    assert not enlist(store, bus_url, begins, "n1").needed
    after(worker, bus, clock, 30)
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "ended"]
    after(worker, bus, clock, 4)
    looks = TableEngine.looks
    after(worker, bus, clock, 60)
    assert TableEngine.looks == looks, "nobody asks for runs that are over"


def test_a_resumed_run_has_another_job(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    """The one before, if it is still there, and its nodes do not take part."""
    run = begin(store, bus_url)
    worker.look(bus)
    first = TableEngine.orders[0]
    stop(store, bus_url, RequestedChange(run, ME), "stopped")
    resume(store, bus_url, RequestedChange(run, ME), Resumption(start=True))
    with store.read() as connection:
        holder = tokens.checked(connection, first.token)
    assert holder is not None
    assert holder.refused == "revoked"
    after(worker, bus, clock, 8)
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "queued"]
    assert TableEngine.orders[1].token != first.token
    assert shown(store, run) == ("queued", "waits as job 2 of Table: Resources")


def test_a_node_takes_part(store: Store, bus: redis.Redis, bus_url: str, worker: Engines) -> None:
    run = begin(store, bus_url, 1, 2)
    worker.look(bus)
    come(store, bus_url, run, "n1", "n2")
    assert shown(store, run) == ("queued", None)
    [launch] = [order for order in orders(bus, "n1") if isinstance(order, Launch)]
    assert (launch.nodes_min, launch.nodes_max, launch.script) == (1, 2, "/shared/train.py")
    answer(store, "n3", run=run)
    assert enlist(store, bus_url, run, "n3").message == "the run has 2 nodes already"
    worker.look(bus)
    ready(store, run, "n1")
    assert shown(store, run) == ("starting", None)
    assert enlist(store, bus_url, run, "n1").needed
    assert len(orders(bus, "n1")) == 1
    assert states(store, run) == {"n1": "starting", "n2": "pending"}


def test_a_node_has_one_run(store: Store, bus_url: str, worker: Engines) -> None:
    first, second = begin(store, bus_url), begin(store, bus_url)
    come(store, bus_url, first, "n1")
    with pytest.raises(ConflictError, match="with the token of run"):
        enlist(store, bus_url, second, "n1")
    with pytest.raises(ConflictError, match="no session"):
        enlist(store, bus_url, second, "n2")
    with pytest.raises(ConflictError, match="no agent answers"):  # it is no place for others
        requests.launch(store, bus_url, NewRun("r", "t.py", 1, "bsp"), ME, start=True)
    other = requests.launch(store, bus_url, NewRun("r", "t.py", 1, "bsp"), ME, start=False)
    with pytest.raises(ConflictError, match="is on local"):
        enlist(store, bus_url, other, "n1")


def test_a_node_of_an_engine_is_no_other_runs_spare(
    store: Store, bus_url: str, worker: Engines
) -> None:
    come(store, bus_url, begin(store, bus_url, 1, 2), "n1")
    answer(store, "n2")
    answer(store, "n3")
    with store.read() as connection:
        assert [node["id"] for node in spares._idle(connection, nodes.listed(connection))] == [
            "n2",
            "n3",
        ]


def test_an_engine_with_a_fault_does_not_end_the_worker(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    engine: type[TableEngine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    begin(store, bus_url, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "look", lambda self, prefix: 1 / 0)
        worker.look(bus)
    assert "managing runs on Table failed" in caplog.text
    assert not engine.orders
    worker._outages.clear()
    worker.look(bus)
    assert engine.orders


def test_a_run_that_the_engine_does_not_answer_about_holds_up_no_other(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    worker: Engines,
    engine: type[TableEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = begin(store, bus_url, 1, 1), begin(store, bus_url, 1, 1)
    asked = []
    submit = engine.submit

    def some(self: TableEngine, order: Order) -> str:
        asked.append(order.run)
        if order.run == first:
            raise EngineAwayError("try again")
        return submit(self, order)

    monkeypatch.setattr(engine, "submit", some)
    worker.look(bus)
    assert asked == [first, second]
    assert [order.run for order in engine.orders] == [second]
    assert worker._outages[first].active, "it is asked again after a pause"
    assert not worker._outages[second].active


def test_the_first_job_ends_and_no_node_has_come(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    """Jobs of nodes that were to join it wait in the queue: alone they would only wait."""
    run = begin(store, bus_url, 1, 2)
    worker.look(bus)
    become("1", "running")
    after(worker, bus, clock, 4)
    assert len(TableEngine.orders) == 2
    become("1", "ended", "FAILED")
    after(worker, bus, clock, 12)
    assert shown(store, run) == ("failed", "job 1 of Table ended before the run did: FAILED")
    after(worker, bus, clock, 4)
    assert TableEngine.jobs["2"].state == "ended"


def test_nodes_that_lost_their_host_are_launched_anew(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines
) -> None:
    """On the nodes that are there: they stay, and no other job is asked for."""
    run = begin(store, bus_url, 1, 3)
    worker.look(bus)
    become("1", "running")
    meetings = Meetings(store, bus_url)
    come(store, bus_url, run, "n1", "n2", "n3")
    for node in ("n1", "n2", "n3"):
        ready(store, run, node)
        meetings.look(bus)
    report(store, run, "n1", State.STOPPED)
    answer(store, "n1", left=True)
    report(store, run, "n2", State.FAILED, message=GONE)
    meetings.look(bus)
    assert enlist(store, bus_url, run, "n2").needed
    report(store, run, "n3", State.STOPPED)
    meetings.look(bus)
    answer(store, "n4", run=run)
    assert enlist(store, bus_url, run, "n4").needed  # but it waits until the others are launched
    assert "n4" not in states(store, run)
    meetings.look(bus)
    assert states(store, run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}
    last = orders(bus, "n3")[-1]
    assert isinstance(last, Launch)
    assert last.attempt > 0
    worker.look(bus)
    assert runs.get(store, run)["backend_jobs"]["jobs"]["0"] == "1"
    assert not [job for job in TableEngine.jobs.values() if job.state == "ended"]


def test_nodes_join_and_leave(
    store: Store, bus: redis.Redis, bus_url: str, worker: Engines, clock: Clock
) -> None:
    run = begin(store, bus_url, 1, 2)
    after(worker, bus, clock, 2)
    become("1", "running")
    after(worker, bus, clock, 4)
    become("2", "running")
    after(worker, bus, clock, 4)
    come(store, bus_url, run, "n1", "n2")
    for node in ("n1", "n2"):
        ready(store, run, node)
    leave(store, bus_url, RequestedChange(run, ME), "n2")
    report(store, run, "n2", State.STOPPED)
    assert enlist(store, bus_url, run, "n2").message == "it was asked to leave the run"
    with pytest.raises(ConflictError, match="table chooses the replacement"):
        replace(store, bus_url, RequestedChange(run, ME), NodeReplacement("n1", other="n3"))
    with pytest.raises(ConflictError, match="give a number"):
        join(store, bus_url, RequestedChange(run, ME), ["n3"], {})
    with pytest.raises(ConflictError, match="at most 2"):
        join(store, bus_url, RequestedChange(run, ME), 2, {})
    join(store, bus_url, RequestedChange(run, ME), 1, {})
    after(worker, bus, clock, 4)
    assert runs.get(store, run)["backend_jobs"]["jobs"] == {"0": "1", "1": "2", "2": "3"}
    assert TableEngine.orders[-1].nodes == 1
    with pytest.raises(ConflictError, match="has 1 nodes and waits for 1 more, and at most 2"):
        join(store, bus_url, RequestedChange(run, ME), 1, {})
    become("3", "ended", "CANCELLED")
    after(worker, bus, clock, 4)
    TableEngine.refuses = "no more"
    report(store, run, "n1", State.RUNNING)
    join(store, bus_url, RequestedChange(run, ME), 1, {})
    after(worker, bus, clock, 4)
    assert shown(store, run) == ("running", "Table refuses the job: no more")
