"""Runs on several nodes: where their launchers meet, what they come to, and a host that leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import redis
import sqlalchemy as sa

from paceline.wire import (
    FAILED_ELSEWHERE,
    JoinRendezvous,
    Kill,
    Launch,
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
from paceline_backend.control.silent_runs import SILENT_S
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
from paceline_backend.store.audit import ChangeFilter, page
from paceline_backend.store.nodes import run_nodes
from support.groups import GONE, ReportedRuns
from support.ingesting import ingesting, reasons
from support.looks import Looks
from support.records import hello
from support.waiting import until

LOOPBACK = "127.0.0.1"


class Group(ReportedRuns):
    """Runs on n1, n2 and n3, and the reconciler of their nodes."""

    def __init__(self, store: Store, bus: redis.Redis, bus_url: str) -> None:
        super().__init__(store, bus, bus_url)
        self.reconciler = NodeReconciler(store, bus_url)

    def look(self, times: int = 2, anew: bool = False) -> None:
        """Twice: what the first look writes, the second acts upon."""
        if anew:  # another worker, from now on
            self.reconciler = NodeReconciler(self.store, self.bus_url)
        for _ in range(times):
            self.reconciler.look(self.bus)

    def meets(self, node: str) -> list[JoinRendezvous]:
        return [order for order in self.orders(node) if isinstance(order, JoinRendezvous)]

    def launches(self, node: str) -> list[int]:
        """The first attempts that a node was launched with."""
        return [order.attempt for order in self.orders(node) if isinstance(order, Launch)]

    def training(self) -> str:
        """A run that trains on three nodes; n1 is its host."""
        run = self.launch()
        for node in ("n1", "n2", "n3"):
            self.ready(run, node)
            self.look()
        telemetry.write(self.store, [(run, hello(world=6))])
        for node in ("n1", "n2", "n3"):
            self.report(run, node, State.RUNNING)
        return run

    def host_gone(self) -> str:
        """A run whose host has left, and whose other launchers have ended."""
        run = self.training()
        self.report(run, "n1", State.STOPPED)
        self.answer("n1", left=True)
        for node in ("n2", "n3"):
            self.report(run, node, State.FAILED, message=GONE)
        self.look(1)
        return run


@pytest.fixture
def group(store: Store, bus: redis.Redis, bus_url: str, monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    made = Group(store, bus, bus_url)
    made.answer("n1", "n2", "n3")
    return made


def test_the_first_node_that_is_ready_hosts(group: Group) -> None:
    run = group.launch()
    group.look()
    assert group.row(run)["node"] is None
    group.ready(run, "n2")
    group.look()
    group.ready(run, "n1")
    group.look()
    assert group.row(run)["node"] == "n2"
    expected = [JoinRendezvous("10.0.0.2", 4002, 0)]
    assert [group.meets(node) for node in ("n1", "n2", "n3")] == [expected, expected, []]


@pytest.mark.parametrize("places", [(LOOPBACK, "10.0.0.2", "10.0.0.3"), (LOOPBACK,) * 3])
def test_a_node_on_loopback_hosts_only_if_all_are_there(
    group: Group, places: tuple[str, ...]
) -> None:
    """Its agent runs beside the server, and the agents of other machines would not reach it."""
    run = group.launch()
    for number, address in enumerate(places, start=1):
        group.look()
        assert number == 3 or group.row(run)["node"] is None
        group.report(run, f"n{number}", State.STARTING, address=address, port=4000)
    group.look()
    host = "n1" if set(places) == {LOOPBACK} else "n2"
    assert group.row(run)["node"] == host
    expected = JoinRendezvous(places[int(host[1]) - 1], 4000, 0)
    assert [group.meets(node) for node in ("n1", "n2", "n3")] == [[expected]] * 3


def test_a_node_that_cannot_reach_a_host_on_loopback_is_told_why(group: Group) -> None:
    group.answer("n2", "n3", left=True)
    run = group.launch()
    group.report(run, "n1", State.STARTING, address=LOOPBACK, port=4000)
    group.look()
    group.answer("n2")
    group.ask(join, run, ["n2"], {})
    group.ready(run, "n2")
    group.look()
    order = group.orders("n2")[-1]
    assert isinstance(order, Kill)
    assert order.reason == (
        "n2 cannot reach the rendezvous on n1 at 127.0.0.1: stop the run, and start the agent "
        "of n1 with --server and an address of the server that all nodes can reach"
    )


def test_a_worker_that_was_killed_before_it_noted_a_meeting_tells_again(group: Group) -> None:
    run = group.launch()
    group.ready(run, "n1")
    group.look()
    with group.store.write() as connection:
        connection.execute(sa.update(schema.run_nodes).values(met=False))
    group.look(anew=True)
    assert len(group.meets("n1")) == 2


def test_a_node_that_missed_its_meeting_is_told_again(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it trains."""
    run = group.launch()
    group.ready(run, "n1")
    group.look()
    monkeypatch.setattr("paceline_backend.control.multi_node._ORDER_AGAIN_S", 0.0)
    group.look(1)
    assert len(group.meets("n1")) == 2
    group.report(run, "n1", State.RUNNING)
    group.look()
    assert len(group.meets("n1")) == 2


def test_each_node_of_a_run_may_report_and_no_other(group: Group) -> None:
    group.answer("n4")
    run = group.launch()
    assert sorted(group.states(run)) == ["n1", "n2", "n3"], "the least busy, then by name"
    for node in ("n2", "n4"):
        sessions.of_node(group.store, group.bus_url, node)
    with ingesting(group.store, group.bus_url):
        publish(group.bus, node_telemetry("n4"), RunState(State.FAILED, 1.0, "n4"), run)
        until(lambda: reasons(group.bus), "the message to be rejected")
        publish(group.bus, node_telemetry("n2"), RunState(State.STARTING, 1.0, "n2"), run)
        until(lambda: group.states(run)["n2"] == "starting", "the state to be stored")
    assert f"node n4 may not report about run {run}" in reasons(group.bus)[0]
    assert group.row(run)["state"] == "starting"


def test_a_node_that_ends_while_others_train_ends_no_run(group: Group) -> None:
    run = group.training()
    assert group.row(run)["state"] == "running"
    group.report(run, "n3", State.STOPPED, message="its agent ended")
    group.report(run, "n1", State.RUNNING, 1)
    now = group.row(run)
    assert (now["state"], now["message"]) == ("running", None)
    for node in ("n1", "n2"):
        group.report(run, node, State.FINISHED, 1, exit_code=0)
    assert group.row(run)["state"] == "finished"


@pytest.mark.parametrize(
    ("ends", "state", "message"),
    [
        ([State.FINISHED, State.FAILED, State.FAILED], "failed", "n2: by n2"),
        ([State.STOPPED, State.FINISHED, State.STOPPED], "finished", "n2: by n2"),
        ([State.STOPPED, State.STOPPED, State.STOPPED], "stopped", "n1: by n1"),
    ],
)
def test_a_run_ends_when_all_nodes_have(
    group: Group, ends: list[State], state: str, message: str
) -> None:
    run = group.launch()
    for number, end in enumerate(ends, start=1):
        assert group.row(run)["ended_at"] is None
        group.report(run, f"n{number}", end, at=number, message=f"by n{number}")
    now = group.row(run)
    assert (now["state"], now["message"], now["ended_at"]) == (state, message, 3.0)


def test_a_failed_node_fails_no_run_that_others_finish_without_it(group: Group) -> None:
    run = group.training()
    group.report(run, "n3", State.FAILED, 0, exit_code=1, message="rank 4 failed")
    for node in ("n1", "n2"):
        group.report(run, node, State.FINISHED, 1)
    assert group.row(run)["state"] == "finished"


def test_the_cause_of_a_failure_is_told_and_not_what_followed(group: Group) -> None:
    run = group.launch()
    followed = f"{FAILED_ELSEWHERE}n3: rank 4 failed"
    for at, node in enumerate(("n1", "n2"), start=1):
        group.report(run, node, State.FAILED, at=at, exit_code=7, message=followed)
    group.report(run, "n3", State.FAILED, at=3.0, exit_code=7, message="rank 4 failed")
    assert group.row(run)["message"] == "n3: rank 4 failed"


def test_the_cause_is_told_by_the_others_if_its_node_does_not(group: Group) -> None:
    run = group.training()
    followed = f"{FAILED_ELSEWHERE}n3: rank 4 failed"
    for node in ("n1", "n2"):
        group.report(run, node, State.FAILED, exit_code=7, message=followed)
    group.report(run, "n3", State.FAILED, message=GONE)
    group.look()
    row = group.row(run)
    assert (row["state"], row["message"]) == ("failed", f"n1: {followed}")


@pytest.mark.parametrize("starts", [True, False])
def test_a_node_that_cannot_start_fails_the_run_if_too_few_are_left(
    group: Group, starts: bool
) -> None:
    """The others would wait ten minutes for another node."""
    run = group.launch(least=3)
    for node in ("n1", "n2"):
        group.ready(run, node)
    if starts:
        group.ready(run, "n3")
        group.look()
    end = {"exit_code": 1} if starts else {}
    group.report(run, "n3", State.FAILED, message="no interface wan7", **end)
    group.look()
    for node in ("n1", "n2"):
        why = "n3 could not start, and without it there are too few nodes"
        assert group.orders(node)[-1] == Kill(why, 0)
        group.report(run, node, State.STOPPED, message=why)
    row = group.row(run)
    assert (row["state"], row["message"]) == ("failed", "n3: no interface wan7")


def test_the_others_start_without_a_node_that_cannot_if_they_are_enough(group: Group) -> None:
    run = group.launch(least=2)
    group.report(run, "n3", State.FAILED, message="no script")
    for node in ("n1", "n2"):
        group.ready(run, node)
        group.look()
    expected = JoinRendezvous("10.0.0.1", 4001, 0)
    assert [group.meets(node) for node in ("n1", "n2")] == [[expected]] * 2


def test_what_comes_of_an_earlier_launch_changes_nothing(group: Group) -> None:
    run = group.training()
    for node in ("n1", "n2", "n3"):
        group.report(run, node, State.FAILED, exit_code=1)
    group.answer("n3", left=True)
    group.ask(resume, run, Resumption(start=True))
    assert group.states(run) == {"n1": "pending", "n2": "pending", "n3": "failed"}
    launched = [order for order in group.orders("n2") if isinstance(order, Launch)]
    assert [(order.attempt, order.nodes_max) for order in launched] == [(0, 3), (1, 3)]
    group.report(run, "n1", State.FAILED)
    group.report(run, "n3", State.FAILED)
    now = group.row(run)
    assert (now["state"], now["node"]) == ("pending", None)
    group.ready(run, "n1", attempt=1)
    group.look()
    assert group.meets("n1")[-1] == JoinRendezvous("10.0.0.1", 4001, 1)


def test_a_stop_reaches_all_nodes(group: Group) -> None:
    run = group.training()
    group.ask(stop, run, "enough", force=True)
    for node in ("n1", "n2", "n3"):
        assert group.orders(node)[-1] == Kill("enough", 0)
    group.report(run, "n1", State.STOPPED)
    for node in ("n2", "n3"):
        group.report(run, node, State.FAILED, message=GONE)
    assert group.row(run)["state"] == "running", "what that means is not known yet"
    group.look()
    assert group.row(run)["state"] == "stopped"


def test_an_agent_that_does_not_answer_has_lost_its_node(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = group.training()
    monkeypatch.setattr("paceline_backend.store.nodes.NODE_ALIVE_S", 7.0)
    looks = Looks(group.store, group.bus_url, silent_s=10_000)
    looks.after(0)
    telemetry.write(
        group.store, [("", NodeState(node, node, 8, 1, [], 1.0, "0")) for node in ("n1", "n3")]
    )
    looks.suspended(3_600)
    assert group.states(run)["n2"] == "running", "the server did not listen"
    telemetry.write(
        group.store, [("", NodeState(node, node, 8, 1, [], 2.0, "0")) for node in ("n1", "n3")]
    )
    looks.after(5)
    assert group.states(run) == {"n1": "running", "n2": "failed", "n3": "running"}
    assert group.row(run)["state"] == "running"
    group.report(run, "n2", State.RUNNING, 1)
    assert group.states(run)["n2"] == "running", "it was only cut off"


def test_a_run_of_which_nothing_comes_is_silent(group: Group) -> None:
    run = group.launch()
    looks = Looks(group.store, group.bus_url)
    assert [looks.after(0), looks.after(SILENT_S)] == [[], [run]]
    group.report(run, "n2", State.STARTING)
    assert group.row(run)["state"] == "starting", "a sign of life"


def test_a_node_that_never_got_its_launch_fails_no_run_that_others_finish(group: Group) -> None:
    """Its agent died as the launch came, and was started again: it answers."""
    run = group.launch()
    looks = Looks(group.store, group.bus_url)
    looks.after(0)
    for node in ("n1", "n2"):
        group.report(run, node, State.RUNNING)
    looks.after(SILENT_S - 1)
    assert group.states(run)["n3"] == "pending"
    for node in ("n1", "n2"):
        group.report(run, node, State.FINISHED, exit_code=0)
    assert group.row(run)["state"] == "running"
    looks.after(1)
    row = group.row(run)
    assert (row["state"], row["message"]) == ("finished", None)
    with group.store.read() as connection:
        last = run_nodes.listed(connection, runs.key_of(connection, run))[-1]
    assert last["message"] == "its agent did not start it within 30 s"


def test_a_node_that_starts_late_takes_part_all_the_same(group: Group) -> None:
    run = group.launch()
    looks = Looks(group.store, group.bus_url)
    looks.after(0)
    group.ready(run, "n1")
    looks.after(SILENT_S)
    assert group.states(run) == {"n1": "starting", "n2": "failed", "n3": "failed"}
    group.ready(run, "n2")
    group.look()
    assert group.meets("n2") == [JoinRendezvous("10.0.0.1", 4001, 0)]


def test_a_launch_anew_does_not_wait_for_a_node_that_never_got_the_one_before(group: Group) -> None:
    run = group.launch()
    looks = Looks(group.store, group.bus_url)
    looks.after(0)
    group.ready(run, "n1")
    group.look()
    group.report(run, "n1", State.STOPPED)
    group.answer("n1", left=True)
    group.report(run, "n2", State.FAILED, message=GONE)
    group.look()
    assert group.states(run)["n2"] == "failed", "it waits for the end of n3"
    looks.after(SILENT_S)
    group.look()
    assert group.states(run) == {"n1": "stopped", "n2": "pending", "n3": "failed"}


def test_when_the_host_leaves_the_others_are_launched_anew(group: Group) -> None:
    run = group.training()
    group.report(run, "n1", State.STOPPED)
    group.answer("n1", left=True)
    group.report(run, "n2", State.FAILED, message=GONE)
    group.look()
    assert group.orders("n3")[-1] == Kill("rendezvous host n1 was lost", 0)
    assert isinstance(group.orders("n2")[-1], JoinRendezvous), "its launcher has ended"
    group.report(run, "n3", State.STOPPED)
    assert group.row(run)["state"] == "running"
    group.look()
    assert group.states(run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}
    for node in ("n2", "n3"):
        order = group.orders(node)[-1]
        assert isinstance(order, Launch)
        assert order.attempt == 1
    with group.store.read() as connection:
        [change, *_] = page(connection, ChangeFilter(run))[0]
    assert (change["who"], change["action"]) == ("the control plane", "run.regroup")
    assert change["details"] == {"left": "n1", "nodes": ["n2", "n3"], "first_attempt": 1}
    group.ready(run, "n3", attempt=1)
    group.look()
    assert group.row(run)["node"] == "n3"


class KilledError(BaseException):
    """Stands for the end of a worker."""


@pytest.mark.parametrize("sent", [0, 1])
def test_a_worker_that_was_killed_before_it_launched_anew_leaves_that_to_the_next(
    group: Group, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    run = group.host_gone()
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
        group.look(1)
        with pytest.raises(KilledError):
            group.look(1)
    assert group.states(run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}
    if sent:
        group.ready(run, "n2", attempt=1)
    group.look(anew=True)
    assert (group.launches("n2"), group.launches("n3")) == ([0, 1], [0, 1])
    group.ready(run, "n3", attempt=1)
    group.look(anew=True)
    assert group.row(run)["node"] in ("n2", "n3")


def test_a_bus_that_blinks_fails_no_launch_anew(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = group.host_gone()
    group.look(1)
    with monkeypatch.context() as away:
        away.setattr(base, "publish", Mock(side_effect=redis.ConnectionError("away")))
        with pytest.raises(redis.ConnectionError):
            group.look(1)
    assert group.row(run)["state"] == "pending"
    group.look(1)
    assert group.launches("n3") == [0, 1]


def test_a_launch_anew_that_cannot_be_fails_the_run(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = group.host_gone()
    monkeypatch.setattr(base, "publish", Mock(side_effect=ValueError("surprise")))
    group.look()
    row = group.row(run)
    assert (row["state"], row["message"]) == ("failed", "it could not be relaunched: ValueError")


def test_a_launch_anew_is_recorded_although_the_bus_is_away(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its transaction asks the bus nothing, and so holds nobody up who writes."""
    run = group.host_gone()
    monkeypatch.setattr(redis.Redis, "execute_command", Mock(side_effect=AssertionError))
    group.look(1)
    assert group.states(run)["n2"] == "pending"


def test_a_run_that_is_stopped_as_it_is_launched_anew_is_ended_again(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = group.host_gone()
    group.look(1)
    wire_publish = base.publish

    def publish(*words: Any, **more: Any) -> None:
        if group.row(run)["state"] == "pending":
            group.ask(stop, run, "enough")
        wire_publish(*words, **more)

    monkeypatch.setattr(base, "publish", publish)
    group.look()
    assert group.row(run)["state"] == "stopped"
    for node in ("n2", "n3"):
        assert group.orders(node)[-1] == Kill("stopped before it started", 1)


def test_a_stop_reaches_the_launch_that_is_recorded_meanwhile(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = group.host_gone()
    real = streams.answering

    def answering(url: str) -> Any:
        monkeypatch.setattr(streams, "answering", real)
        group.look()
        return real(url)

    monkeypatch.setattr(streams, "answering", answering)
    group.ask(stop, run, "enough")
    assert group.row(run)["state"] == "stopped"
    for node in ("n2", "n3"):
        assert group.orders(node)[-1] == Kill("enough", 1)


def test_what_was_read_before_another_launch_settles_nothing(group: Group) -> None:
    """Two workers may look at once."""
    run = group.host_gone()
    with group.store.read() as connection:
        read = run_nodes.group(connection, run)
    assert read is not None
    group.look(1)
    for late in (read, replace(read, rendezvous=Rendezvous.WAITING)):
        regroup.settle(group.store, group.bus, late)
        regroup.regroup(group.store, group.bus, late)
    assert group.states(run)["n2"] == "pending"
    assert group.row(run)["state"] == "pending"


def test_no_launch_is_recorded_while_a_node_goes_on_that_was_lost(group: Group) -> None:
    run = group.host_gone()
    with group.store.read() as connection:
        read = run_nodes.group(connection, run)
    assert read is not None
    with group.store.write() as connection:
        values = {"state": State.RUNNING}  # as ingest does when a lost node reports
        run_nodes.change(connection, read.nodes[1], values)
    regroup.regroup(group.store, group.bus, read)
    assert group.states(run)["n2"] == "running"


def test_a_host_that_may_only_be_cut_off_keeps_its_attempts(group: Group) -> None:
    """Otherwise steps of two trainings would count as those of one attempt."""
    run = group.training()
    with group.store.write() as connection:
        telemetry.lose(connection, run, "n1", "its agent does not answer")
    group.answer("n1", left=True)
    for node in ("n2", "n3"):
        group.report(run, node, State.FAILED, message=GONE)
    group.look()
    group.look()
    first = group.row(run)["first_attempt"]
    assert first > 1_000, "as many attempts as a launch may come to"
    assert group.launches("n2") == [0, first]
    assert group.orders("n1")[-1] == Kill("rendezvous host n1 was lost", 0)
    group.ready(run, "n2", attempt=first)
    group.report(run, "n1", State.RUNNING, first - 1)
    assert group.row(run)["state"] == "starting", "the earlier launch changes nothing"


def test_a_run_that_has_no_numbers_left_says_so(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regroup, "MOST_ATTEMPTS", 1_001)
    run = group.host_gone()
    group.look(1)
    row = group.row(run)
    assert row["state"] == "failed"
    assert row["message"] == (
        "rendezvous host n1 was lost: a run has at most 1,001 attempts: start another run"
    )


@pytest.mark.parametrize(
    ("least", "env", "why"),
    [
        (1, {"TOKEN": "secret"}, "was started with values of TOKEN, which are not stored"),
        (3, {}, "3 nodes are needed; agents that answer and have a session: 2 (n2, n3)"),
    ],
)
def test_a_run_that_cannot_be_launched_anew_fails_and_says_why(
    group: Group, least: int, env: dict[str, str], why: str
) -> None:
    run = group.launch(least, env=env)
    group.ready(run, "n1")
    group.look()
    group.report(run, "n1", State.STOPPED)
    group.answer("n1", left=True)
    for node in ("n2", "n3"):
        group.report(run, node, State.FAILED, message=GONE)
    group.look()
    group.look()
    now = group.row(run)
    assert now["state"] == "failed"
    assert why in now["message"]
    assert f"`paceline resume {run}`" in now["message"]


def test_a_host_whose_script_fails_fails_the_run(group: Group) -> None:
    """It is not launched anew: it would fail again."""
    run = group.training()
    group.report(run, "n1", State.FAILED, exit_code=1, message="rank 0: ValueError")
    for node in ("n2", "n3"):
        group.report(run, node, State.FAILED, message=GONE)
    group.look()
    now = group.row(run)
    assert (now["state"], now["message"]) == ("failed", "n1: rank 0: ValueError")


def test_a_node_that_was_asked_to_leave_is_left_out(group: Group) -> None:
    """Its agent answers, and the others go on, also when it was their host."""
    run = group.training()
    group.ask(leave, run, "n1")
    group.report(run, "n1", State.STOPPED)
    for node in ("n2", "n3"):
        group.report(run, node, State.FAILED, message=GONE)
    group.look()
    assert group.states(run) == {"n1": "stopped", "n2": "pending", "n3": "pending"}


def test_a_node_that_joins_is_told_where_the_others_meet(group: Group) -> None:
    run = group.training()
    group.report(run, "n3", State.STOPPED)
    group.ask(join, run, ["n3"], {})
    group.ready(run, "n3")
    group.look()
    assert group.meets("n3") == [JoinRendezvous("10.0.0.1", 4001, 0)] * 2
    group.report(run, "n3", State.RUNNING, 1)
    assert group.states(run)["n3"] == "running"


def test_an_order_to_leave_that_was_lost_is_repeated(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = group.training()
    group.ask(leave, run, "n3")
    group.bus.delete(commands("n3"))
    group.look(1)
    assert group.orders("n3") == [], "it may still be on its way"
    monkeypatch.setattr("paceline_backend.control.multi_node._ORDER_AGAIN_S", 0.0)
    group.look(1)
    order = Kill("it was asked to leave the run", 0, leaves=True)
    assert group.orders("n3") == [order]
    group.report(run, "n3", State.STOPPED)
    group.look(1)
    assert group.orders("n3") == [order]
