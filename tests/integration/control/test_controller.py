"""Controllers with the real leader, ingest, bus and databases."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from paceline.node.processes import die_with_parent
from paceline.planning import planner
from paceline.planning.offer import YOUNG_STEPS
from paceline.wire import TELEMETRY, Plan, RunState, State, live
from paceline.wire.bus import publish
from paceline_backend.control import Controller, ControllerManager, controller, leases
from paceline_backend.insight.replay import replay
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, runs, schema, telemetry
from paceline_backend.store.planning import load
from support import poison
from support.cluster import plaid_like
from support.leading import Leading, ingest, new_run, planning, switch, working
from support.postgres import Postgres
from support.waiting import until

SIZES = plaid_like(860)
SPEEDS = np.array([1.0, 1.0, 1.5, 3.0]) * 1e-5


def manager(
    store: Store, bus_url: str, owner: str = "one", lease_s: float = 5.0
) -> ControllerManager:
    return ControllerManager(store, bus_url, owner, lease_s=lease_s)


@contextmanager
def planned(store: Store, bus_url: str, run: str, **options: Any) -> Iterator[Leading]:
    """Training with ingest and a manager of controllers."""
    with (
        working(ingest(store, bus_url), planning(manager(store, bus_url))),
        Leading(bus_url, run, SIZES, SPEEDS, **options) as training,
    ):
        yield training


def slowest_over_mean(segment_ett: list[list[float]]) -> float:
    return float(np.mean([max(step) / np.mean(step) for step in segment_ett]))


def test_trains_switches_and_ends(store: Store, bus_url: str) -> None:
    """A whole life: proposals supersede, a switch needs four steps at most, coverage is exact."""
    run = new_run(store)
    with planned(store, bus_url, run, epochs=2) as training:
        first = training.follow(1)[0]
        assert (first.policy, first.version, first.steps) == ("bsp", 0, 2)
        training.follow(1)
        feedback = [p.plan.feedback for p in training.proposals() if p.plan.seq == 1]
        # Without feedback, unless the first segment's steps arrived before the plan was made.
        assert feedback in ([[], [(0, 2)]], [[(0, 2)]]), "newer feedback supersedes"

        training.proposed(training.knows)
        requested = training.leader.seq
        running = training.adopt()
        version = switch(store, bus_url, run, "chronica", window=32)
        training.report(running)
        plan = training.proposed(lambda s: s.version == version and training.knows(s))
        assert plan.seq == requested + 1
        assert plan.first_step - running.first_step <= 4
        assert plan.shuffled and plan.policy == "chronica"
        taken = training.adopt()
        # The controller may have offered the segment after it already.
        offered = [p.plan for p in training.proposals() if p.plan.seq == taken.seq]
        assert taken == offered[-1]
        assert slowest_over_mean(taken.ett_s) < 1.05
        assert taken.shares == pytest.approx((1 / SPEEDS) / (1 / SPEEDS).sum(), rel=0.05)
        training.report(taken)
        while training.epoch < 2:
            training.follow(1)
        training.stored(store)
        training.assert_exact()
        shuffled = [s for s in training.segments if s.shuffled]
        assert [(s.epoch, s.version) for s in shuffled] == [(0, 0), (0, 1), (1, 1)]
        with store.read() as connection:
            query = sa.select(schema.switches.c.effective_step).order_by(schema.switches.c.version)
            assert list(connection.scalars(query)) == [0, taken.first_step]
        ended = training.leader.seq
        publish(training.bus, TELEMETRY, RunState(State.FINISHED, 1.0, "node"), run)
        until(lambda: not leased(store), "the controller to give its lease back")
        assert not [p for p in training.proposals() if p.plan.seq >= ended], "epochs are done"


def leased(store: Store) -> list[str]:
    """Owners."""
    with store.read() as connection:
        query = sa.select(schema.leases.c.owner).where(schema.leases.c.purpose == "plan")
        return list(connection.scalars(query))


def past_youth(training: Leading) -> list[Plan]:
    """Trains until a plan rests on enough steps to last a second; returns the segments."""
    segments = training.follow(2)
    while sum(plan.steps for plan in segments) <= YOUNG_STEPS + segments[-1].steps:
        segments += training.follow(1)
    return segments


def test_segments_adapt_when_steps_become_faster(store: Store, bus_url: str) -> None:
    run = new_run(store)
    with planned(store, bus_url, run, global_batch=8, step_s=0.5) as training:
        past_youth(training)
        assert [s.steps for s in training.follow(2)] == [2, 2]
        training.step_s = 0.1
        assert [s.steps for s in training.follow(4)] == [2, 2, 3, 4]


def test_coasted_segments_are_planned_around(store: Store, bus_url: str) -> None:
    run = new_run(store, "chronica")
    with (
        working(ingest(store, bus_url)),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        training.coast(3)
        with working(planning(manager(store, bus_url))):
            training.follow(3)
        training.report(training.adopt())  # perhaps its last proposal
        training.coast(2)  # nobody plans: in the last shares
        assert training.segments[-1].shares == training.segments[-3].shares != []
        with working(planning(manager(store, bus_url, "two"))):
            after = training.follow(4)
        assert after[0].shuffled, "a controller that takes over shuffles"
        training.assert_exact()
        assert training.epoch == 1


def test_lookahead_adopts_before_the_steps_run(store: Store, bus_url: str) -> None:
    """Data loader workers read ahead: segments are adopted while earlier ones have no feedback."""
    run = new_run(store, "chronica")
    with planned(store, bus_url, run, lookahead=4) as training:
        waiting = []
        for _ in range(8):
            training.proposed()
            waiting.append(training.adopt())
            if len(waiting) > 2:
                training.report(waiting.pop(0))
        assert all(s.source == "controller" for s in training.segments)
        training.assert_exact()


_MANAGER = """
import sys, threading
from paceline_backend.control import ControllerManager
from paceline_backend.control.periodic import Periodic
from paceline_backend.store import Store
database, bus, owner, lease_s = sys.argv[1:]
with Store.open(database) as store:
    manager = ControllerManager(store, bus, owner, lease_s=float(lease_s))
    Periodic("controllers", 0.25, manager.look, manager.end).run(threading.Event())
"""


def test_a_killed_controller_is_replaced(store: Store, database_url: str, bus_url: str) -> None:
    """kill -9 in mid-epoch: another takes over once the lease expires, and no sample is lost."""
    run = new_run(store, "chronica")
    first = subprocess.Popen(
        [sys.executable, "-c", _MANAGER, database_url, bus_url, "first", "1.5"],
        preexec_fn=die_with_parent,
    )
    second = manager(store, bus_url, "second", lease_s=1.5)
    try:
        with (
            working(ingest(store, bus_url)),
            Leading(bus_url, run, SIZES, SPEEDS) as training,
        ):
            training.follow(2)
            with working(planning(second)):
                training.follow(1)
                training.proposed(training.knows)
                assert {p.controller for p in training.proposals()} == {"first"}
                first.kill()
                training.report(training.adopt())  # its last proposal is as valid as ever
                training.report(training.adopt())  # coasted, unless the machine is slow
                offer = training.proposed()
                assert training.proposals()[-1].controller == "second"
                assert offer.shuffled
                while training.epoch == 0:
                    training.follow(1)
            training.assert_exact()
            owners = [p.controller for p in training.proposals()]
            assert owners == sorted(owners), "never both at once"
    finally:
        first.kill()
        first.wait()


@pytest.mark.parametrize("policy", ["chronica", "dynamic-batching"])
def test_a_new_attempt_goes_on(store: Store, bus_url: str, policy: str) -> None:
    """After a restart the leader says where it resumes: speeds and memory are known from there."""
    run = new_run(store, policy)
    with working(ingest(store, bus_url), planning(manager(store, bus_url))):
        with Leading(bus_url, run, SIZES, SPEEDS) as training:
            training.follow(3)
            used = np.concatenate([np.frombuffer(s.indices, "<u4") for s in training.segments])
            step = training.reported + 1
        used = used.astype(np.int64)
        with Leading(bus_url, run, SIZES, SPEEDS, attempt=1, step=step, used=used) as again:
            first = again.proposed()
            assert (first.seq, first.first_step, first.feedback) == (0, step, [(0, step)])
            assert first.ett_s, "the ranks' speeds are known"
            last = [s for s in training.segments if s.source == "controller"][-1]
            with store.read() as connection:
                history, window = load(connection, runs.key_of(connection, run)) or pytest.fail()
            history.recall(window.ranges())
            assert history.memory(last.version) == last.memory
            while again.epoch == 0:
                again.follow(1)
            rest = np.concatenate([np.frombuffer(s.indices, "<u4") for s in again.segments])
            assert sorted([*used, *rest]) == list(range(len(SIZES)))
    report = replay(store, run)
    assert report.exact
    assert report.segments > 1
    assert report.unknown == 0


def test_a_gap_in_the_live_stream_is_filled_from_the_database(store: Store, bus_url: str) -> None:
    run = new_run(store, "chronica")
    with planned(store, bus_url, run) as training:
        training.follow(2)
        training.proposed(training.knows)
        for _ in range(2):  # committed, but never on the live stream
            training.report(training.adopt(send=False), send=False)
        telemetry.write(store, [(run, message) for message in training.unsent])
        training.unsent.clear()
        training.adopt()
        training.report(training.segments[-1])
        assert training.segments[-1].source == "coast", "the controller was behind"
        training.follow(3)
        training.assert_exact()


def test_a_bus_that_goes_away_and_comes_back(store: Store, tmp_path: Path) -> None:
    run = new_run(store, "chronica")
    with (
        EmbeddedBus(tmp_path / "bus") as bus,
        working(ingest(store, bus.url), planning(manager(store, bus.url))),
        Leading(bus.url, run, SIZES, SPEEDS) as training,
    ):
        training.follow(2)
        training.proposed(training.knows)
        bus.kill()
        training.report(training.adopt(send=False), send=False)  # its last proposal
        for _ in range(2):
            training.report(training.adopt(send=False), send=False)
        assert [s.source for s in training.segments[-2:]] == ["coast", "coast"]
        bus.start()
        training.send()
        training.follow(3)
        training.assert_exact()


def test_a_database_that_goes_away_and_comes_back(
    request: pytest.FixtureRequest, bus_url: str
) -> None:
    import psycopg

    server: Postgres = request.getfixturevalue("_postgres")
    url = server.database()
    name = url.rpartition("/")[2]

    def allow(connections: bool) -> None:
        admin = f"host=127.0.0.1 port={server.port} user=paceline dbname=postgres"
        with psycopg.connect(admin, autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS {connections}".encode())
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
            )

    with Store.open(url) as store:
        run = new_run(store, "chronica")
        with (
            working(ingest(store, bus_url), planning(manager(store, bus_url, lease_s=1.0))),
            Leading(bus_url, run, SIZES, SPEEDS) as training,
        ):
            training.follow(2)
            training.proposed(training.knows)
            allow(False)
            training.report(training.adopt())
            training.coast(2)
            allow(True)
            training.follow(3)
            training.assert_exact()


def test_without_its_lease_a_controller_is_silent(store: Store, bus_url: str) -> None:
    run = new_run(store)
    with (
        working(ingest(store, bus_url)),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        training.coast(1)
        training.stored(store)
        lease = leases.acquire(store, training.key(store), "me", 60)
        assert lease is not None
        own = Controller(store, bus_url, training.key(store), run, lease)
        with working(own.run):
            training.follow(2)
            made = len(training.proposals())
            lease.prolong(0.0)
            for _ in range(3):
                training.report(training.adopt())
            training.stored(store)
        assert len(training.proposals()) <= made + 1, "at most the one that it was at"
        own.run(threading.Event())  # returns at once
        assert len(training.proposals()) <= made + 1


def test_a_plan_that_took_longer_than_the_lease_is_not_proposed(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then another controller may plan the run."""
    run = new_run(store)
    with (
        working(ingest(store, bus_url)),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        training.coast(1)
        training.stored(store)
        lease = leases.acquire(store, training.key(store), "me", 60)
        assert lease is not None
        real, planned = planner.offer, list[Plan]()

        def offer(*arguments: Any) -> Any:
            made = real(*arguments)
            planned.append(made[0])
            lease.prolong(0.0)
            return made

        monkeypatch.setattr(planner, "offer", offer)
        Controller(store, bus_url, training.key(store), run, lease).run(threading.Event())
        assert len(planned) == 1
        assert training.proposals() == []


@pytest.mark.parametrize(
    ("policy", "parameters", "why"),
    [
        ("chronica", {"window": "long"}, "parameters.window: 'long'"),
        ("not-installed-here", {}, "no policy 'not-installed-here'"),
    ],
)
def test_after_a_policy_that_cannot_be_made_another_plans(
    store: Store,
    bus_url: str,
    caplog: pytest.LogCaptureFixture,
    policy: str,
    parameters: dict[str, Any],
    why: str,
) -> None:
    run = new_run(store, policy, **parameters)
    with planned(store, bus_url, run) as training:
        until(lambda: why in caplog.text, "the reason in the log")
        training.coast(2)
        assert training.proposals() == []
        switch(store, bus_url, run, "bsp")
        assert training.follow(2)[-1].policy == "bsp"
    assert caplog.text.count(why) == 1
    assert "Traceback" not in caplog.text


def test_no_poison_on_the_live_stream_ends_a_controller(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """All but what ends a run."""
    bad = {n: f for n, f in poison.TELEMETRY.items() if n not in poison.STATES}
    run = new_run(store, "chronica")
    with planned(store, bus_url, run, epochs=2) as training:
        training.follow(2)
        for fields in bad.values():
            entry: Any = {**fields, b"run": run.encode()}
            training.bus.xadd(live(run), entry)
        assert all(not plan.shuffled for plan in training.follow(3)), "it did not start anew"
        training.assert_exact()
    assert "failed" not in caplog.text and "controller restarts" not in caplog.text
    lines = [
        record.getMessage() for record in caplog.records if "is ignored" in record.getMessage()
    ]
    assert lines and len(lines) == len(set(lines))
    assert any("groups" in line or "counts" in line for line in lines)


def test_a_plan_that_fails_ends_no_controller(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures, mended = planner.offer, list[str](), threading.Event()

    def offer(*arguments: Any) -> Any:
        if not mended.is_set():
            failures.append("surprise")
            raise KeyError("surprise")
        return real(*arguments)

    monkeypatch.setattr(planner, "offer", offer)
    run = new_run(store)
    with planned(store, bus_url, run) as training:
        until(lambda: "KeyError: 'surprise'" in caplog.text, "the reason in the log")
        training.coast(1)
        until(lambda: len(failures) >= 2, "the next plan to fail")
        coasted = training.adopt(send=False)
        assert coasted.source == "coast"
        mended.set()  # what it hears of next, it plans on
        training.report(coasted)
        training.follow(2)
    assert caplog.text.count("planning is paused until new telemetry arrives") == 1
    assert "controller restarts" not in caplog.text


def test_what_the_leader_would_refuse_is_not_proposed(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = planner.offer, iter(range(1))

    def offer(*arguments: Any) -> Any:
        segment, shuffle = real(*arguments)
        if next(failing, None) is None:
            return segment, shuffle
        return msgspec.structs.replace(segment, moved=-1), shuffle

    monkeypatch.setattr(planner, "offer", offer)
    run = new_run(store)
    with planned(store, bus_url, run) as training:
        until(lambda: "moved is -1" in caplog.text, "the reason in the log")
        training.coast(2)
        training.follow(2)
        assert all(proposal.plan.moved >= 0 for proposal in training.proposals())
    assert "Traceback" not in caplog.text
    assert caplog.text.count("planning is paused until new telemetry arrives") == 1


def test_a_controller_that_fails_unexpectedly_starts_anew(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = Controller._hear, iter(range(1))

    def hear(self: Controller, message: Any) -> None:
        if next(failing, None) is not None:
            raise KeyError("surprise")
        real(self, message)

    monkeypatch.setattr(Controller, "_hear", hear)
    monkeypatch.setattr(controller, "_CONTROLLER_RESTART_S", 0.01)
    run = new_run(store)
    with planned(store, bus_url, run) as training:
        training.follow(1)
        until(lambda: "restarts: KeyError: 'surprise'" in caplog.text, "the reason in the log")
        training.follow(2)
    assert "leader repeats the last split" not in caplog.text, "the manager was not needed"


def test_other_runs_messages_are_not_ours(store: Store, bus_url: str) -> None:
    """Two runs at once, each planned by its own controller."""
    with working(ingest(store, bus_url), planning(manager(store, bus_url))):
        runs = [new_run(store, policy) for policy in ("bsp", "chronica")]
        with (
            Leading(bus_url, runs[0], SIZES, SPEEDS) as bsp,
            Leading(bus_url, runs[1], SIZES[:300], SPEEDS[:2]) as chronica,
        ):
            for _ in range(3):
                bsp.follow(1)
                chronica.follow(1)
            assert {s.policy for s in bsp.segments} == {"bsp"}
            assert {s.policy for s in chronica.segments} == {"chronica"}
            assert {len(s.counts[0]) for s in chronica.segments} == {2}
        assert live(runs[0]) != live(runs[1])
