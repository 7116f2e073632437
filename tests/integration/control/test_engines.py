"""Runs on an engine against its jobs: what a worker does, whenever another was killed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace as replaced
from functools import partial

import pytest
import sqlalchemy as sa

from paceline.wire import Kill, Launch, State
from paceline_backend import requests
from paceline_backend.backends import EngineAwayError, Job, Order
from paceline_backend.control import engines as managing
from paceline_backend.control import leases
from paceline_backend.control.engines import Engines, telling
from paceline_backend.control.multi_node import NodeReconciler
from paceline_backend.control.periodic import Periodic
from paceline_backend.control.silent_runs import SILENT_S
from paceline_backend.requests import (
    ConflictError,
    Resumption,
    join,
    leave,
    resume,
    spares,
    stop,
)
from paceline_backend.requests.replacing import NodeReplacement, replace
from paceline_backend.store import leases as stored_leases
from paceline_backend.store import nodes, runs, schema, telemetry, tokens
from paceline_backend.store.jobs import EngineRun
from paceline_backend.store.new_runs import NewRun
from support.engine import TableEngine, TableRuns, become
from support.groups import GONE, ME
from support.looks import Looks
from support.waiting import DEADLINE_S, until


def test_a_run_is_submitted_once_and_waits(table: TableRuns) -> None:
    run = table.begin(2, 3)
    assert table.shown(run) == ("pending", None)
    table.after(60)
    [order] = TableEngine.orders
    assert (order.nodes, order.run, order.server) == (2, run, "http://head:1")
    assert table.shown(run) == ("queued", "waits as job 1 of Table: Resources")
    assert table.row(run)["backend_jobs"] == {"launch": 0, "jobs": {"0": "1", "1": None}}
    become("1", "running")
    table.after(60)
    assert table.shown(run) == ("queued", "waits for the nodes of job 1 of Table")
    assert [order.nodes for order in TableEngine.orders] == [2, 1]
    assert len({order.label for order in TableEngine.orders}) == 2


def test_another_worker_goes_on_where_the_first_was_killed(table: TableRuns) -> None:
    """It had submitted the job, perhaps twice, and noted nothing."""
    run = table.begin()
    table.worker._attendant._note = lambda *_: None  # type: ignore[method-assign]
    table.look()
    first = TableEngine.orders[0]
    TableEngine.submit(TableEngine(), first)
    table.worker = table.another()
    table.after(10)
    assert table.jobs(run) == {"0": "1"}
    assert [job.state for job in TableEngine.jobs.values()] == ["queued", "ended"]
    assert len({order.token for order in TableEngine.orders}) == 1


def test_two_workers_do_not_submit_a_run_twice(table: TableRuns) -> None:
    run = table.begin()
    key = table.key(run)
    assert leases.acquire(table.store, key, "other", 600, "jobs") is not None
    table.after(20)
    assert TableEngine.orders == []
    table.worker = table.another("other")
    table.after(2)
    assert len(TableEngine.orders) == 1


def test_a_worker_that_is_slow_submits_nothing_twice(
    table: TableRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has asked the engine, and then another worker submits the job and is killed."""
    run = table.begin()
    key = table.key(run)
    other = table.another("other")
    other._attendant._note = lambda *_: None  # type: ignore[method-assign]
    assert leases.acquire(table.store, key, "other", 600, "jobs") is not None
    ask = TableEngine.look

    def slowly(self: TableEngine, prefix: str) -> Sequence[Job]:
        monkeypatch.setattr(TableEngine, "look", ask)
        known = ask(self, prefix)
        other.look(table.bus)
        stored_leases.release(table.store, key, "other", "jobs")  # as if it had expired
        return known

    monkeypatch.setattr(TableEngine, "look", slowly)
    table.after(8)
    assert len(TableEngine.orders) == 1
    assert table.jobs(run) == {"0": "1"}


def test_a_controller_that_ends_leaves_no_hole(
    table: TableRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same worker plans the run, and no longer does while the engine takes its job."""
    run = table.begin()
    key = table.key(run)
    submit = TableEngine.submit

    def slowly(self: TableEngine, order: Order) -> str:
        monkeypatch.setattr(TableEngine, "submit", submit)
        plans = leases.acquire(table.store, key, "worker", 3)
        assert plans is not None
        leases.release(table.store, plans)
        table.another("other").look(table.bus)
        return submit(self, order)

    monkeypatch.setattr(TableEngine, "submit", slowly)
    table.look()
    assert len(TableEngine.orders) == 1


def test_a_claim_lasts_as_long_as_the_engine_takes(
    table: TableRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a lease does; and a worker that ends leaves none."""
    monkeypatch.setattr(managing, "ENGINE_LEASE_S", 0.5)
    table.begin()
    submit, stop_worker, others = TableEngine.submit, threading.Event(), []

    def owned() -> list[tuple[str, float]]:
        with table.store.read() as connection:
            c = schema.leases.c
            query = sa.select(c.owner, c.expires_at).where(c.purpose == "jobs")
            return [(row.owner, row.expires_at) for row in connection.execute(query)]

    def slowly(self: TableEngine, order: Order) -> str:
        [(_, expires_at)] = owned()
        until(lambda: owned()[0][1] > expires_at + 1, "a claim that was prolonged")
        others.extend(owner for owner, _ in owned())
        stop_worker.set()
        return submit(self, order)

    monkeypatch.setattr(TableEngine, "submit", slowly)
    engines = Engines(table.store, "worker")
    parts = [
        Periodic("engines", 0.1, partial(engines.look, table.bus), engines.end),
        Periodic("claims", managing.ENGINE_LEASE_S / 3, engines.keep_claims),
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
    table: TableRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = table.begin()
    ask = TableEngine.look

    def slowly(self: TableEngine, prefix: str) -> Sequence[Job]:
        monkeypatch.setattr(TableEngine, "look", ask)
        table.ask(stop, run, "stopped")
        return ask(self, prefix)

    monkeypatch.setattr(TableEngine, "look", slowly)
    table.after(8)
    assert TableEngine.orders == []


def test_nothing_is_over_while_another_worker_may_submit(table: TableRuns) -> None:
    """Else a job that comes late would belong to a run that nobody looks after any more."""
    run = table.begin()
    table.look()
    table.ask(stop, run, "stopped")
    table.after(4)
    key = table.key(run)
    table.worker._claims.give_back()
    assert leases.acquire(table.store, key, "other", 600, "jobs") is not None
    become("1", "ended")
    table.after(8)
    assert table.valid(run) == 1
    stored_leases.release(table.store, key, "other", "jobs")
    table.after(4)
    assert table.valid(run) == 0


def test_nodes_are_launched_when_all_of_the_first_job_are_there(table: TableRuns) -> None:
    """An engine that gives some earlier than others says that the job waits."""
    run = table.begin(2, 2)
    table.look()
    table.come(run, "n1")
    table.after(3600, every_s=60)
    assert table.orders("n1") == []
    assert table.shown(run) == ("queued", "waits as job 1 of Table: Resources")
    become("1", "running")
    table.after(4)
    table.come(run, "n1", "n2")
    launched = [order for node in ("n1", "n2") for order in table.orders(node)]
    assert [isinstance(order, Launch) for order in launched] == [True, True]


def test_nodes_are_launched_at_once_when_all_have_come(table: TableRuns) -> None:
    """Before the engine was asked again, which calls the job queued. Earlier nodes do not count."""
    run = table.begin(2, 2)
    table.look()
    table.come(run, "n1")
    assert table.orders("n1") == []
    table.come(run, "n2")
    table.come(run, "n1")
    launched = [order for node in ("n1", "n2") for order in table.orders(node)]
    assert [isinstance(order, Launch) for order in launched] == [True, True]
    for node in ("n1", "n2"):
        table.report(run, node, State.FAILED)
    table.ask(resume, run, Resumption(start=True))
    table.come(run, "n3")
    assert table.orders("n3") == []


def test_what_the_engine_refuses_fails_the_run(table: TableRuns) -> None:
    TableEngine.refuses = "no such partition"
    run = table.begin()
    table.look()
    assert table.shown(run) == ("failed", "Table refuses the job: no such partition")


def test_nothing_fails_while_the_engine_is_away(table: TableRuns) -> None:
    waits, trains = table.begin(), table.begin()
    table.look()
    become("2", "running")
    table.come(trains, "n1")
    table.report(trains, "n1", State.RUNNING)
    TableEngine.away = True
    with pytest.raises(EngineAwayError):
        TableEngine().look("")
    table.after(3600, every_s=60)
    assert table.shown(waits) == ("queued", "Table does not answer: no route")
    assert table.shown(trains) == ("running", None)
    TableEngine.away = False
    table.worker._outages.clear()  # its pauses are of real time
    table.after(4)
    assert table.shown(waits) == ("queued", "waits as job 1 of Table: Resources")


def test_a_run_that_waits_is_not_lost(table: TableRuns) -> None:
    run = table.begin()
    looks = Looks(table.store, table.bus_url)
    for _ in range(3):
        table.now += 2 * SILENT_S
        assert looks.after(2 * SILENT_S) == []
        table.look()
    assert table.shown(run)[0] == "queued"


def test_a_job_that_is_gone_fails_its_run(table: TableRuns) -> None:
    run = table.begin()
    table.look()
    become("1", "running")
    table.come(run, "n1")
    table.report(run, "n1", State.RUNNING)
    become("1", "ended", "TIMEOUT (TimeLimit)")
    table.after(4)
    assert table.shown(run)[0] == "running"  # what the node reported may be on its way
    table.after(7)
    why = "job 1 of Table ended before the run did: TIMEOUT (TimeLimit)"
    assert table.shown(run) == ("failed", why)
    assert table.valid(run) == 1
    table.after(4)
    assert table.valid(run) == 0
    table.report(run, "n1", State.FINISHED, exit_code=0)  # it knows better
    assert table.shown(run)[0] == "finished"


def test_a_job_that_somebody_ends_says_so(table: TableRuns) -> None:
    """Not where the script failed, and not where somebody stopped the run."""
    ends = {"n1": State.STOPPED, "n2": State.FAILED, "n3": State.STOPPED}
    of_node = {node: table.begin() for node in ends}
    table.look()
    for number, (node, run) in enumerate(of_node.items(), 1):
        become(str(number), "running")
        table.come(run, node)
        table.report(run, node, State.RUNNING)
    table.ask(stop, of_node["n3"], "stopped", force=True)
    for number, (node, run) in enumerate(of_node.items(), 1):
        code = 1 if ends[node] is State.FAILED else None
        table.report(run, node, ends[node], message="the end", exit_code=code)
        become(str(number), "ended", "CANCELLED")
    table.after(8)
    assert [table.shown(run) for run in of_node.values()] == [
        ("stopped", "the end; job 1 of Table ended: CANCELLED"),
        ("failed", "the end"),
        ("stopped", "the end"),
    ]


@pytest.mark.parametrize("first", ["the engine", "silence"])
def test_a_run_whose_job_somebody_cancels_is_stopped(table: TableRuns, first: str) -> None:
    """Its nodes were killed before they could say so: whoever notices that first."""
    run = table.begin(1, 2)
    table.look()
    become("1", "running")
    table.come(run, "n1")
    table.report(run, "n1", State.RUNNING)
    table.after(4)
    become("1", "ended", "CANCELLED")
    become("2", "ended", "CANCELLED")
    if first == "silence":
        with table.store.write() as connection:
            telemetry.lose(connection, run, "n1", "its agent does not answer")
        assert table.shown(run) == ("failed", "n1: its agent does not answer")
    table.after(12)
    state, message = table.shown(run)
    assert state == "stopped"
    assert "job 1 of Table ended" in str(message)
    assert "CANCELLED" in str(message)
    table.report(run, "n1", State.RUNNING, at=table.now)  # it was only cut off
    assert table.shown(run)[0] == "running"


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("goes_on", ["this worker", "another"])
def test_a_job_that_the_control_plane_ends_was_cancelled_by_nobody(
    table: TableRuns, monkeypatch: pytest.MonkeyPatch, goes_on: str, keeps: bool
) -> None:
    monkeypatch.setattr(TableEngine, "keeps_ended", keeps)
    run = table.begin()
    table.look()
    become("1", "running")
    table.come(run, "n1")
    table.report(run, "n1", State.RUNNING)
    table.after(4)
    with table.store.write() as connection:
        assert runs.end(connection, run, State.FAILED, "it is lost", lost=True)
    for _ in range(60):
        if TableEngine.jobs["1"].state == "running":
            table.after(1)
    assert TableEngine.jobs["1"].cancelled
    if keeps:
        TableEngine.jobs.clear()
    if goes_on == "another":  # the first one was killed: whether it ended the job is not known
        table.worker = table.another()
    table.after(8)
    words = "it is lost" + ("" if keeps else "; job 1 of Table ended: CANCELLED")
    assert table.shown(run) == ("failed", words)
    assert table.valid(run) == 0


def test_a_job_that_cannot_be_submitted_holds_up_no_node(
    table: TableRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nodes that a run needs are there, and the engine does not take the job of a further."""
    run = table.begin(2, 3)
    table.look()
    become("1", "running")

    def full(self: TableEngine, order: Order) -> str:
        raise EngineAwayError("too many jobs")

    monkeypatch.setattr(TableEngine, "submit", full)
    table.after(12)
    assert table.row(run)["backend_jobs"]["begun"] == ["0"]


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


def test_a_job_that_somebody_removed(table: TableRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """From an engine that keeps ended jobs for long."""
    monkeypatch.setattr(TableEngine, "keeps_ended", True)
    waits, trains = table.begin(), table.begin()
    table.look()
    become("2", "running")
    table.come(trains, "n1")
    table.report(trains, "n1", State.RUNNING)
    table.after(4)
    TableEngine.jobs.clear()
    with table.store.write() as connection:
        assert runs.end(connection, trains, State.FAILED, "n1 is lost", lost=True)
    table.after(12)
    why = "job 1 of Table ended before the run did: it was removed"
    assert table.shown(waits) == ("stopped", why)
    why = "n1 is lost; job 2 of Table ended: it was removed"
    assert table.shown(trains) == ("stopped", why)


def test_jobs_that_the_engine_has_forgotten(table: TableRuns) -> None:
    run = table.begin()
    table.look()
    TableEngine.jobs.clear()
    table.after(12)
    assert table.shown(run) == ("failed", "Table no longer lists the run's jobs: 1")
    assert len(TableEngine.orders) == 1


def test_jobs_of_a_stopped_run_are_stopped(table: TableRuns) -> None:
    waits, begins = table.begin(), table.begin()
    table.look()
    become("2", "running")
    table.come(begins, "n1")
    for run in (waits, begins):
        table.ask(stop, run, "stopped")
        assert table.shown(run)[0] == "stopped"
    assert any(isinstance(order, Kill) for order in table.orders("n1"))
    table.after(4)
    # A node may have something to deliver, and goes by itself.
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "running"]
    assert not table.enlist(begins, "n1").needed
    table.after(30)
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "ended"]
    table.after(4)
    looks = TableEngine.looks
    table.after(60)
    assert TableEngine.looks == looks, "nobody asks for runs that are over"


def test_a_resumed_run_has_another_job(table: TableRuns) -> None:
    """The one before, if it is still there, and its nodes do not take part."""
    run = table.begin()
    table.look()
    first = TableEngine.orders[0]
    table.ask(stop, run, "stopped")
    table.ask(resume, run, Resumption(start=True))
    with table.store.read() as connection:
        holder = tokens.checked(connection, first.token)
    assert holder is not None
    assert holder.refused == "revoked"
    table.after(8)
    assert [job.state for job in TableEngine.jobs.values()] == ["ended", "queued"]
    assert TableEngine.orders[1].token != first.token
    assert table.shown(run) == ("queued", "waits as job 2 of Table: Resources")


def test_a_node_takes_part(table: TableRuns) -> None:
    run = table.begin(1, 2)
    table.look()
    table.come(run, "n1", "n2")
    assert table.shown(run) == ("queued", None)
    [launch] = [order for order in table.orders("n1") if isinstance(order, Launch)]
    assert (launch.nodes_min, launch.nodes_max, launch.script) == (1, 2, "/shared/train.py")
    table.answer("n3", run=run)
    assert table.enlist(run, "n3").message == "the run has 2 nodes already"
    table.look()
    table.ready(run, "n1")
    assert table.shown(run) == ("starting", None)
    assert table.enlist(run, "n1").needed
    assert len(table.orders("n1")) == 1
    assert table.states(run) == {"n1": "starting", "n2": "pending"}


def test_a_node_has_one_run(table: TableRuns) -> None:
    first, second = table.begin(), table.begin()
    table.come(first, "n1")
    with pytest.raises(ConflictError, match="with the token of run"):
        table.enlist(second, "n1")
    with pytest.raises(ConflictError, match="no session"):
        table.enlist(second, "n2")
    with pytest.raises(ConflictError, match="no agent is available"):  # it is no place for others
        requests.launch(table.store, table.bus_url, NewRun("r", "t.py", 1, "bsp"), ME, start=True)
    other = requests.launch(
        table.store, table.bus_url, NewRun("r", "t.py", 1, "bsp"), ME, start=False
    )
    with pytest.raises(ConflictError, match="is on local"):
        table.enlist(other, "n1")


def test_a_node_of_an_engine_is_no_other_runs_spare(table: TableRuns) -> None:
    table.come(table.begin(1, 2), "n1")
    table.answer("n2")
    table.answer("n3")
    with table.store.read() as connection:
        idle = spares._idle(connection, nodes.listed(connection))
    assert [node["id"] for node in idle] == ["n2", "n3"]


def test_an_engine_with_a_fault_does_not_end_the_worker(
    table: TableRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    table.begin(1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(TableEngine, "look", lambda self, prefix: 1 / 0)
        table.look()
    assert "managing runs on Table failed" in caplog.text
    assert not TableEngine.orders
    table.worker._outages.clear()
    table.look()
    assert TableEngine.orders


def test_a_run_that_the_engine_does_not_answer_about_holds_up_no_other(
    table: TableRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = table.begin(1, 1), table.begin(1, 1)
    asked = []
    submit = TableEngine.submit

    def some(self: TableEngine, order: Order) -> str:
        asked.append(order.run)
        if order.run == first:
            raise EngineAwayError("try again")
        return submit(self, order)

    monkeypatch.setattr(TableEngine, "submit", some)
    table.look()
    assert asked == [first, second]
    assert [order.run for order in TableEngine.orders] == [second]
    assert table.worker._outages[first].active, "it is asked again after a pause"
    assert not table.worker._outages[second].active


def test_the_first_job_ends_and_no_node_has_come(table: TableRuns) -> None:
    """Jobs of nodes that were to join it wait in the queue: alone they would only wait."""
    run = table.begin(1, 2)
    table.look()
    become("1", "running")
    table.after(4)
    assert len(TableEngine.orders) == 2
    become("1", "ended", "FAILED")
    table.after(12)
    assert table.shown(run) == ("failed", "job 1 of Table ended before the run did: FAILED")
    table.after(4)
    assert TableEngine.jobs["2"].state == "ended"


def test_nodes_that_lost_their_host_are_launched_anew(table: TableRuns) -> None:
    """On the nodes that are there: they stay, and no other job is asked for."""
    run = table.begin(1, 3)
    table.look()
    become("1", "running")
    reconciler = NodeReconciler(table.store, table.bus_url)
    table.come(run, "n1", "n2", "n3")
    for node in ("n1", "n2", "n3"):
        table.ready(run, node)
        reconciler.look(table.bus)
    table.report(run, "n1", State.STOPPED)
    table.answer("n1", left=True)
    table.report(run, "n2", State.FAILED, message=GONE)
    reconciler.look(table.bus)
    assert table.enlist(run, "n2").needed
    table.report(run, "n3", State.STOPPED)
    reconciler.look(table.bus)
    table.answer("n4", run=run)
    assert table.enlist(run, "n4").needed  # but it waits until the others are launched
    assert "n4" not in table.states(run)
    reconciler.look(table.bus)
    assert table.states(run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}
    last = table.orders("n3")[-1]
    assert isinstance(last, Launch)
    assert last.attempt > 0
    table.look()
    assert table.jobs(run)["0"] == "1"
    assert not [job for job in TableEngine.jobs.values() if job.state == "ended"]


def test_nodes_join_and_leave(table: TableRuns) -> None:
    run = table.begin(1, 2)
    table.after(2)
    become("1", "running")
    table.after(4)
    become("2", "running")
    table.after(4)
    table.come(run, "n1", "n2")
    for node in ("n1", "n2"):
        table.ready(run, node)
    table.ask(leave, run, "n2")
    table.report(run, "n2", State.STOPPED)
    assert table.enlist(run, "n2").message == "it was asked to leave the run"
    with pytest.raises(ConflictError, match="table chooses the replacement"):
        table.ask(replace, run, NodeReplacement("n1", other="n3"))
    with pytest.raises(ConflictError, match="give a number"):
        table.ask(join, run, ["n3"], {})
    with pytest.raises(ConflictError, match="at most 2"):
        table.ask(join, run, 2, {})
    table.ask(join, run, 1, {})
    table.after(4)
    assert table.jobs(run) == {"0": "1", "1": "2", "2": "3"}
    assert TableEngine.orders[-1].nodes == 1
    with pytest.raises(
        ConflictError, match="has 1 nodes and waits for 1 more, and may have at most 2"
    ):
        table.ask(join, run, 1, {})
    become("3", "ended", "CANCELLED")
    table.after(4)
    TableEngine.refuses = "no more"
    table.report(run, "n1", State.RUNNING)
    table.ask(join, run, 1, {})
    table.after(4)
    assert table.shown(run) == ("running", "Table refuses the job: no more")
