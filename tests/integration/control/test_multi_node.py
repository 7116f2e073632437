"""Runs on several nodes: where their launchers meet, what they come to, and a host that leaves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import (
    FAILED_ELSEWHERE,
    Kill,
    Launch,
    Meet,
    NodeState,
    RunState,
    State,
    commands,
    node_telemetry,
)
from paceline.wire.bus import publish
from paceline.wire.states import Rendezvous
from paceline_backend.backends import base
from paceline_backend.control.multi_node import NodeReconciler
from paceline_backend.control.silence import SILENT_S
from paceline_backend.requests import (
    Resumption,
    join,
    leave,
    regroup,
    resume,
    sessions,
    stop,
    streams,
)
from paceline_backend.store import Store, nodes, runs, schema, telemetry
from paceline_backend.store.audit import ChangeFilter, RequestedChange, page
from paceline_backend.store.nodes import run_nodes
from support.groups import GONE, ME, answer, launch, orders, ready, report, states
from support.ingesting import ingesting, reasons
from support.looks import Looks
from support.records import hello
from support.waiting import until

LOOPBACK = "127.0.0.1"


@pytest.fixture(autouse=True)
def _three_nodes(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nodes, "ALIVE_S", 3600)  # the machine may be busy
    answer(store, "n1", "n2", "n3")
    yield


@pytest.fixture
def reconciler(store: Store, bus_url: str) -> NodeReconciler:
    return NodeReconciler(store, bus_url)


def look(reconciler: NodeReconciler, bus: redis.Redis) -> None:
    """Twice: what the first look writes, the second acts upon."""
    reconciler.look(bus)
    reconciler.look(bus)


def meets(bus: redis.Redis, node: str) -> list[Meet]:
    return [order for order in orders(bus, node) if isinstance(order, Meet)]


def training(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler, least: int = 1
) -> str:
    """A run that trains on three nodes; n1 is its host."""
    run = launch(store, bus_url, least)
    for node in ("n1", "n2", "n3"):
        ready(store, run, node)
        look(reconciler, bus)
    telemetry.write(store, [(run, hello(world=6))])
    for node in ("n1", "n2", "n3"):
        report(store, run, node, State.RUNNING)
    return run


def test_the_first_node_that_is_ready_hosts(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = launch(store, bus_url)
    look(reconciler, bus)
    assert runs.get(store, run)["node"] is None
    ready(store, run, "n2")
    look(reconciler, bus)
    ready(store, run, "n1")
    look(reconciler, bus)
    assert runs.get(store, run)["node"] == "n2"
    expected = [Meet("10.0.0.2", 4002, 0)]
    assert [meets(bus, node) for node in ("n1", "n2", "n3")] == [expected, expected, []]


@pytest.mark.parametrize("places", [(LOOPBACK, "10.0.0.2", "10.0.0.3"), (LOOPBACK,) * 3])
def test_a_node_on_loopback_hosts_only_if_all_are_there(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    places: tuple[str, ...],
) -> None:
    """Its agent runs beside the server, and the agents of other machines would not reach it."""
    run = launch(store, bus_url)
    for number, address in enumerate(places, start=1):
        look(reconciler, bus)
        assert number == 3 or runs.get(store, run)["node"] is None
        report(store, run, f"n{number}", State.STARTING, address=address, port=4000)
    look(reconciler, bus)
    host = "n1" if set(places) == {LOOPBACK} else "n2"
    assert runs.get(store, run)["node"] == host
    expected = Meet(places[int(host[1]) - 1], 4000, 0)
    assert [meets(bus, node) for node in ("n1", "n2", "n3")] == [[expected]] * 3


def test_a_node_that_cannot_reach_a_host_on_loopback_is_told_why(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    answer(store, "n2", "n3", left=True)
    run = launch(store, bus_url)
    report(store, run, "n1", State.STARTING, address=LOOPBACK, port=4000)
    look(reconciler, bus)
    answer(store, "n2")
    join(store, bus_url, RequestedChange(run, ME), ["n2"], {})
    ready(store, run, "n2")
    look(reconciler, bus)
    order = orders(bus, "n2")[-1]
    assert isinstance(order, Kill)
    assert order.reason == (
        "n2 cannot reach the rendezvous on n1 at 127.0.0.1: stop the run, and start the agent "
        "of n1 with --server and an address of the server that all nodes can reach"
    )


def test_a_worker_that_was_killed_before_it_noted_a_meeting_tells_again(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = launch(store, bus_url)
    ready(store, run, "n1")
    look(reconciler, bus)
    with store.write() as connection:
        connection.execute(sa.update(schema.run_nodes).values(met=False))
    look(NodeReconciler(store, bus_url), bus)
    assert len(meets(bus, "n1")) == 2


def test_a_node_that_missed_its_meeting_is_told_again(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until it trains."""
    run = launch(store, bus_url)
    ready(store, run, "n1")
    look(reconciler, bus)
    monkeypatch.setattr("paceline_backend.control.multi_node._ORDER_AGAIN_S", 0.0)
    reconciler.look(bus)
    assert len(meets(bus, "n1")) == 2
    report(store, run, "n1", State.RUNNING)
    look(reconciler, bus)
    assert len(meets(bus, "n1")) == 2


def test_each_node_of_a_run_may_report_and_no_other(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    answer(store, "n4")
    run = launch(store, bus_url)
    assert sorted(states(store, run)) == ["n1", "n2", "n3"], "the least busy, then by name"
    for node in ("n2", "n4"):
        sessions.of_node(store, bus_url, node)
    with ingesting(store, bus_url):
        publish(bus, node_telemetry("n4"), RunState(State.FAILED, 1.0, "n4"), run)
        until(lambda: reasons(bus), "the message to be rejected")
        publish(bus, node_telemetry("n2"), RunState(State.STARTING, 1.0, "n2"), run)
        until(lambda: states(store, run)["n2"] == "starting", "the state to be stored")
    assert f"node n4 may not report about run {run}" in reasons(bus)[0]
    assert runs.get(store, run)["state"] == "starting"


def test_a_node_that_ends_while_others_train_ends_no_run(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = training(store, bus, bus_url, reconciler)
    assert runs.get(store, run)["state"] == "running"
    report(store, run, "n3", State.STOPPED, message="its agent ended")
    report(store, run, "n1", State.RUNNING, 1)
    now = runs.get(store, run)
    assert (now["state"], now["message"]) == ("running", None)
    for node in ("n1", "n2"):
        report(store, run, node, State.FINISHED, 1, exit_code=0)
    assert runs.get(store, run)["state"] == "finished"


@pytest.mark.parametrize(
    ("ends", "state", "message"),
    [
        ([State.FINISHED, State.FAILED, State.FAILED], "failed", "n2: by n2"),
        ([State.STOPPED, State.FINISHED, State.STOPPED], "finished", "n2: by n2"),
        ([State.STOPPED, State.STOPPED, State.STOPPED], "stopped", "n1: by n1"),
    ],
)
def test_a_run_ends_when_all_nodes_have(
    store: Store, bus_url: str, ends: list[State], state: str, message: str
) -> None:
    run = launch(store, bus_url)
    for number, end in enumerate(ends, start=1):
        assert runs.get(store, run)["ended_at"] is None
        report(store, run, f"n{number}", end, at=number, message=f"by n{number}")
    now = runs.get(store, run)
    assert (now["state"], now["message"], now["ended_at"]) == (state, message, 3.0)


def test_a_failed_node_fails_no_run_that_others_finish_without_it(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = training(store, bus, bus_url, reconciler)
    report(store, run, "n3", State.FAILED, 0, exit_code=1, message="rank 4 failed")
    for node in ("n1", "n2"):
        report(store, run, node, State.FINISHED, 1)
    assert runs.get(store, run)["state"] == "finished"


def test_the_cause_of_a_failure_is_told_and_not_what_followed(store: Store, bus_url: str) -> None:
    run = launch(store, bus_url)
    followed = f"{FAILED_ELSEWHERE}n3: rank 4 failed"
    for at, node in enumerate(("n1", "n2"), start=1):
        report(store, run, node, State.FAILED, at=at, exit_code=7, message=followed)
    report(store, run, "n3", State.FAILED, at=3.0, exit_code=7, message="rank 4 failed")
    assert runs.get(store, run)["message"] == "n3: rank 4 failed"


def test_the_cause_is_told_by_the_others_if_its_node_does_not(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = training(store, bus, bus_url, reconciler)
    followed = f"{FAILED_ELSEWHERE}n3: rank 4 failed"
    for node in ("n1", "n2"):
        report(store, run, node, State.FAILED, exit_code=7, message=followed)
    report(store, run, "n3", State.FAILED, message=GONE)
    look(reconciler, bus)
    row = runs.get(store, run)
    assert (row["state"], row["message"]) == ("failed", f"n1: {followed}")


@pytest.mark.parametrize("starts", [True, False])
def test_a_node_that_cannot_start_fails_the_run_if_too_few_are_left(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler, starts: bool
) -> None:
    """The others would wait ten minutes for another node."""
    run = launch(store, bus_url, least=3)
    for node in ("n1", "n2"):
        ready(store, run, node)
    if starts:
        ready(store, run, "n3")
        look(reconciler, bus)
    end = {"exit_code": 1} if starts else {}
    report(store, run, "n3", State.FAILED, message="no interface wan7", **end)
    look(reconciler, bus)
    for node in ("n1", "n2"):
        why = "n3 could not start, and without it there are too few nodes"
        assert orders(bus, node)[-1] == Kill(why, 0)
        report(store, run, node, State.STOPPED, message=why)
    row = runs.get(store, run)
    assert (row["state"], row["message"]) == ("failed", "n3: no interface wan7")


def test_the_others_start_without_a_node_that_cannot_if_they_are_enough(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = launch(store, bus_url, least=2)
    report(store, run, "n3", State.FAILED, message="no script")
    for node in ("n1", "n2"):
        ready(store, run, node)
        look(reconciler, bus)
    expected = Meet("10.0.0.1", 4001, 0)
    assert [meets(bus, node) for node in ("n1", "n2")] == [[expected]] * 2


def test_what_comes_of_an_earlier_launch_changes_nothing(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = training(store, bus, bus_url, reconciler)
    for node in ("n1", "n2", "n3"):
        report(store, run, node, State.FAILED, exit_code=1)
    answer(store, "n3", left=True)
    resume(store, bus_url, RequestedChange(run, ME), Resumption(start=True))
    assert states(store, run) == {"n1": "pending", "n2": "pending", "n3": "failed"}
    launched = [order for order in orders(bus, "n2") if isinstance(order, Launch)]
    assert [(order.attempt, order.nodes_max) for order in launched] == [(0, 3), (1, 3)]
    report(store, run, "n1", State.FAILED)
    report(store, run, "n3", State.FAILED)
    now = runs.get(store, run)
    assert (now["state"], now["node"]) == ("pending", None)
    ready(store, run, "n1", attempt=1)
    look(reconciler, bus)
    assert meets(bus, "n1")[-1] == Meet("10.0.0.1", 4001, 1)


def test_a_stop_reaches_all_nodes(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = training(store, bus, bus_url, reconciler)
    stop(store, bus_url, RequestedChange(run, ME), "enough", force=True)
    for node in ("n1", "n2", "n3"):
        assert orders(bus, node)[-1] == Kill("enough", 0)
    report(store, run, "n1", State.STOPPED)
    for node in ("n2", "n3"):
        report(store, run, node, State.FAILED, message=GONE)
    assert runs.get(store, run)["state"] == "running", "what that means is not known yet"
    look(reconciler, bus)
    assert runs.get(store, run)["state"] == "stopped"


def test_an_agent_that_does_not_answer_has_lost_its_node(
    store: Store,
    bus_url: str,
    bus: redis.Redis,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = training(store, bus, bus_url, reconciler)
    monkeypatch.setattr("paceline_backend.store.nodes.ALIVE_S", 7.0)
    looks = Looks(store, bus_url, silent_s=10_000)
    looks.after(0)
    telemetry.write(
        store, [("", NodeState(node, node, 8, 1, [], 1.0, "0")) for node in ("n1", "n3")]
    )
    looks.suspended(3_600)
    assert states(store, run)["n2"] == "running", "the server did not listen"
    telemetry.write(
        store, [("", NodeState(node, node, 8, 1, [], 2.0, "0")) for node in ("n1", "n3")]
    )
    looks.after(5)
    assert states(store, run) == {"n1": "running", "n2": "failed", "n3": "running"}
    assert runs.get(store, run)["state"] == "running"
    report(store, run, "n2", State.RUNNING, 1)
    assert states(store, run)["n2"] == "running", "it was only cut off"


def test_a_run_of_which_nothing_comes_is_silent(store: Store, bus_url: str) -> None:
    run = launch(store, bus_url)
    looks = Looks(store, bus_url)
    assert [looks.after(0), looks.after(SILENT_S)] == [[], [run]]
    report(store, run, "n2", State.STARTING)
    assert runs.get(store, run)["state"] == "starting", "a sign of life"


def test_a_node_that_never_got_its_launch_fails_no_run_that_others_finish(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent died as the launch came, and was started again: it answers."""
    monkeypatch.setattr("paceline_backend.store.nodes.ALIVE_S", 3600)
    run = launch(store, bus_url)
    looks = Looks(store, bus_url)
    looks.after(0)
    for node in ("n1", "n2"):
        report(store, run, node, State.RUNNING)
    looks.after(SILENT_S - 1)
    assert states(store, run)["n3"] == "pending"
    for node in ("n1", "n2"):
        report(store, run, node, State.FINISHED, exit_code=0)
    assert runs.get(store, run)["state"] == "running"
    looks.after(1)
    row = runs.get(store, run)
    assert (row["state"], row["message"]) == ("finished", None)
    with store.read() as connection:
        last = run_nodes.listed(connection, runs.key_of(connection, run))[-1]
    assert last["message"] == "its agent did not start it within 30 s"


def test_a_node_that_starts_late_takes_part_all_the_same(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = launch(store, bus_url)
    looks = Looks(store, bus_url)
    looks.after(0)
    ready(store, run, "n1")
    looks.after(SILENT_S)
    assert states(store, run) == {"n1": "starting", "n2": "failed", "n3": "failed"}
    ready(store, run, "n2")
    look(reconciler, bus)
    assert meets(bus, "n2") == [Meet("10.0.0.1", 4001, 0)]


def test_a_launch_anew_does_not_wait_for_a_node_that_never_got_the_one_before(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = launch(store, bus_url)
    looks = Looks(store, bus_url)
    looks.after(0)
    ready(store, run, "n1")
    look(reconciler, bus)
    report(store, run, "n1", State.STOPPED)
    answer(store, "n1", left=True)
    report(store, run, "n2", State.FAILED, message=GONE)
    look(reconciler, bus)
    assert states(store, run)["n2"] == "failed", "it waits for the end of n3"
    looks.after(SILENT_S)
    look(reconciler, bus)
    assert states(store, run) == {"n1": "stopped", "n2": "pending", "n3": "failed"}


def test_when_the_host_leaves_the_others_are_launched_anew(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = training(store, bus, bus_url, reconciler)
    report(store, run, "n1", State.STOPPED)
    answer(store, "n1", left=True)
    report(store, run, "n2", State.FAILED, message=GONE)
    look(reconciler, bus)
    assert orders(bus, "n3")[-1] == Kill("rendezvous host n1 was lost", 0)
    assert isinstance(orders(bus, "n2")[-1], Meet), "its launcher has ended"
    report(store, run, "n3", State.STOPPED)
    assert runs.get(store, run)["state"] == "running"
    look(reconciler, bus)
    assert states(store, run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}
    for node in ("n2", "n3"):
        order = orders(bus, node)[-1]
        assert isinstance(order, Launch)
        assert order.attempt == 1
    with store.read() as connection:
        [change, *_] = page(connection, ChangeFilter(run))[0]
    assert (change["who"], change["action"]) == ("the control plane", "run.regroup")
    assert change["details"] == {"left": "n1", "nodes": ["n2", "n3"], "first_attempt": 1}
    ready(store, run, "n3", attempt=1)
    look(reconciler, bus)
    assert runs.get(store, run)["node"] == "n3"


class KilledError(Exception):
    """Stands for the end of a worker."""


def host_gone(store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler) -> str:
    """A run whose host has left, and whose other launchers have ended."""
    run = training(store, bus, bus_url, reconciler)
    report(store, run, "n1", State.STOPPED)
    answer(store, "n1", left=True)
    for node in ("n2", "n3"):
        report(store, run, node, State.FAILED, message=GONE)
    reconciler.look(bus)
    return run


def launches(bus: redis.Redis, node: str) -> list[int]:
    """The first attempts that a node was launched with."""
    return [order.attempt for order in orders(bus, node) if isinstance(order, Launch)]


@pytest.mark.parametrize("sent", [0, 1])
def test_a_worker_that_was_killed_before_it_launched_anew_leaves_that_to_the_next(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
    sent: int,
) -> None:
    run = host_gone(store, bus, bus_url, reconciler)
    published: list[str] = []

    def publish(*words: Any, **more: Any) -> None:
        if len(published) == sent:
            raise KilledError
        published.append(words[1])
        wire_publish(*words, **more)

    wire_publish = base.publish
    with monkeypatch.context() as killed:
        killed.setattr(base, "publish", publish)
        killed.setattr(regroup, "_failed", Mock(side_effect=KilledError))
        reconciler.look(bus)
        with pytest.raises(KilledError):
            reconciler.look(bus)
    assert states(store, run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}
    if sent:
        ready(store, run, "n2", attempt=1)
    look(NodeReconciler(store, bus_url), bus)
    assert (launches(bus, "n2"), launches(bus, "n3")) == ([0, 1], [0, 1])
    ready(store, run, "n3", attempt=1)
    look(NodeReconciler(store, bus_url), bus)
    assert runs.get(store, run)["node"] in ("n2", "n3")


def test_a_bus_that_blinks_fails_no_launch_anew(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = host_gone(store, bus, bus_url, reconciler)
    reconciler.look(bus)
    with monkeypatch.context() as away:
        away.setattr(base, "publish", Mock(side_effect=redis.ConnectionError("away")))
        with pytest.raises(redis.ConnectionError):
            reconciler.look(bus)
    assert runs.get(store, run)["state"] == "pending"
    reconciler.look(bus)
    assert launches(bus, "n3") == [0, 1]


def test_a_launch_anew_that_cannot_be_fails_the_run(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = host_gone(store, bus, bus_url, reconciler)
    monkeypatch.setattr(base, "publish", Mock(side_effect=ValueError("surprise")))
    look(reconciler, bus)
    row = runs.get(store, run)
    assert (row["state"], row["message"]) == ("failed", "it could not be relaunched: ValueError")


def test_a_launch_anew_is_recorded_although_the_bus_is_away(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its transaction asks the bus nothing, and so holds nobody up who writes."""
    run = host_gone(store, bus, bus_url, reconciler)
    monkeypatch.setattr(redis.Redis, "execute_command", Mock(side_effect=AssertionError))
    reconciler.look(bus)
    assert states(store, run)["n2"] == "pending"


def test_a_run_that_is_stopped_as_it_is_launched_anew_is_ended_again(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = host_gone(store, bus, bus_url, reconciler)
    reconciler.look(bus)
    wire_publish = base.publish

    def publish(*words: Any, **more: Any) -> None:
        if runs.get(store, run)["state"] == "pending":
            stop(store, bus_url, RequestedChange(run, ME), "enough")
        wire_publish(*words, **more)

    monkeypatch.setattr(base, "publish", publish)
    look(reconciler, bus)
    assert runs.get(store, run)["state"] == "stopped"
    for node in ("n2", "n3"):
        assert orders(bus, node)[-1] == Kill("stopped before it started", 1)


def test_a_stop_reaches_the_launch_that_is_recorded_meanwhile(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = host_gone(store, bus, bus_url, reconciler)
    real = streams.answering

    def answering(url: str) -> Any:
        monkeypatch.setattr(streams, "answering", real)
        look(reconciler, bus)
        return real(url)

    monkeypatch.setattr(streams, "answering", answering)
    stop(store, bus_url, RequestedChange(run, ME), "enough")
    assert runs.get(store, run)["state"] == "stopped"
    for node in ("n2", "n3"):
        assert orders(bus, node)[-1] == Kill("enough", 1)


def test_what_was_read_before_another_launch_settles_nothing(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    """Two workers may look at once."""
    run = host_gone(store, bus, bus_url, reconciler)
    with store.read() as connection:
        read = run_nodes.group(connection, run)
    assert read is not None
    reconciler.look(bus)
    for late in (read, replace(read, rendezvous=Rendezvous.WAITING)):
        regroup.settle(store, bus, late)
        regroup.regroup(store, bus, late)
    assert states(store, run)["n2"] == "pending"
    assert runs.get(store, run)["state"] == "pending"


def test_no_launch_is_recorded_while_a_node_goes_on_that_was_lost(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = host_gone(store, bus, bus_url, reconciler)
    with store.read() as connection:
        read = run_nodes.group(connection, run)
    assert read is not None
    with store.write() as connection:
        values = {"state": State.RUNNING}  # as ingest does when a lost node reports
        run_nodes.change(connection, read.nodes[1], values)
    regroup.regroup(store, bus, read)
    assert states(store, run)["n2"] == "running"


def test_a_host_that_may_only_be_cut_off_keeps_its_attempts(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    """Otherwise steps of two trainings would count as those of one attempt."""
    run = training(store, bus, bus_url, reconciler)
    with store.write() as connection:
        telemetry.lose(connection, run, "n1", "its agent does not answer")
    answer(store, "n1", left=True)
    for node in ("n2", "n3"):
        report(store, run, node, State.FAILED, message=GONE)
    look(reconciler, bus)
    look(reconciler, bus)
    first = runs.get(store, run)["first_attempt"]
    assert first > 1_000, "as many attempts as a launch may come to"
    assert launches(bus, "n2") == [0, first]
    assert orders(bus, "n1")[-1] == Kill("rendezvous host n1 was lost", 0)
    ready(store, run, "n2", attempt=first)
    report(store, run, "n1", State.RUNNING, first - 1)
    assert runs.get(store, run)["state"] == "starting", "the earlier launch changes nothing"


def test_a_run_that_has_no_numbers_left_says_so(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(regroup, "MOST_ATTEMPTS", 1_001)
    run = host_gone(store, bus, bus_url, reconciler)
    reconciler.look(bus)
    row = runs.get(store, run)
    assert row["state"] == "failed"
    assert row["message"] == (
        "rendezvous host n1 was lost: a run has at most 1,001 attempts: start another run"
    )


@pytest.mark.parametrize(
    ("least", "env", "why"),
    [
        (1, {"TOKEN": "secret"}, "was started with values of TOKEN, which are not stored"),
        (3, {}, "3 nodes are needed; agents with a session that answer: 2 (n2, n3)"),
    ],
)
def test_a_run_that_cannot_be_launched_anew_fails_and_says_why(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    least: int,
    env: dict[str, str],
    why: str,
) -> None:
    run = launch(store, bus_url, least, env=env)
    ready(store, run, "n1")
    look(reconciler, bus)
    report(store, run, "n1", State.STOPPED)
    answer(store, "n1", left=True)
    for node in ("n2", "n3"):
        report(store, run, node, State.FAILED, message=GONE)
    look(reconciler, bus)
    look(reconciler, bus)
    now = runs.get(store, run)
    assert now["state"] == "failed"
    assert why in now["message"]
    assert f"`paceline resume {run}`" in now["message"]


def test_a_host_whose_script_fails_fails_the_run(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    """It is not launched anew: it would fail again."""
    run = training(store, bus, bus_url, reconciler)
    report(store, run, "n1", State.FAILED, exit_code=1, message="rank 0: ValueError")
    for node in ("n2", "n3"):
        report(store, run, node, State.FAILED, message=GONE)
    look(reconciler, bus)
    now = runs.get(store, run)
    assert (now["state"], now["message"]) == ("failed", "n1: rank 0: ValueError")


def test_a_node_that_was_asked_to_leave_is_left_out(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    """Its agent answers, and the others go on, also when it was their host."""
    run = training(store, bus, bus_url, reconciler)
    leave(store, bus_url, RequestedChange(run, ME), "n1")
    report(store, run, "n1", State.STOPPED)
    for node in ("n2", "n3"):
        report(store, run, node, State.FAILED, message=GONE)
    look(reconciler, bus)
    assert states(store, run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}


def test_an_order_to_leave_that_was_lost_is_repeated(
    store: Store,
    bus: redis.Redis,
    bus_url: str,
    reconciler: NodeReconciler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = training(store, bus, bus_url, reconciler)
    leave(store, bus_url, RequestedChange(run, ME), "n3")
    bus.delete(commands("n3"))
    reconciler.look(bus)
    assert orders(bus, "n3") == [], "it may still be on its way"
    monkeypatch.setattr("paceline_backend.control.multi_node._ORDER_AGAIN_S", 0.0)
    reconciler.look(bus)
    order = Kill("it was asked to leave the run", 0, leaves=True)
    assert orders(bus, "n3") == [order]
    report(store, run, "n3", State.STOPPED)
    reconciler.look(bus)
    assert orders(bus, "n3") == [order]


def test_a_node_that_joins_is_told_where_the_others_meet(
    store: Store, bus: redis.Redis, bus_url: str, reconciler: NodeReconciler
) -> None:
    run = training(store, bus, bus_url, reconciler)
    report(store, run, "n3", State.STOPPED)
    join(store, bus_url, RequestedChange(run, ME), ["n3"], {})
    ready(store, run, "n3")
    look(reconciler, bus)
    assert meets(bus, "n3") == [Meet("10.0.0.1", 4001, 0)] * 2
    report(store, run, "n3", State.RUNNING, 1)
    assert states(store, run)["n3"] == "running"
