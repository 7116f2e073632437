"""Controllers with the real leader, ingest, bus and databases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from paceline.node.processes import die_with_parent
from paceline.wire import TELEMETRY, Adopted, RunState, live, pack_indices
from paceline.wire.bus import publish
from paceline_backend import policies
from paceline_backend.control import Controller, ControllerManager, controller, leases
from paceline_backend.planning.feedback import Window
from paceline_backend.planning.history import History
from paceline_backend.policies import Feedback, plan
from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.store import Store, schema, telemetry
from support import poison
from support.cluster import plaid_like
from support.leading import Leading, ingest, new_run, switch, working
from support.node import until
from support.postgres import Postgres
from support.records import adopted, hello, record

SIZES = plaid_like(860)
SPEEDS = np.array([1.0, 1.0, 1.5, 3.0]) * 1e-5


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


def manager(
    store: Store, bus_url: str, owner: str = "one", lease_s: float = 5.0
) -> ControllerManager:
    return ControllerManager(store, bus_url, owner, lease_s=lease_s)


def slowest_over_mean(segment_ett: list[list[float]]) -> float:
    return float(np.mean([max(step) / np.mean(step) for step in segment_ett]))


def test_trains_switches_and_ends(store: Store, bus_url: str) -> None:
    """A whole life: proposals supersede, a switch needs four steps at most, coverage is exact."""
    run = new_run(store)
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS, epochs=2) as training,
    ):
        first = training.follow(1)[0]
        assert (first.policy, first.version, first.steps) == ("bsp", 0, 2)
        training.follow(1)
        before = [p for p in training.proposals() if p.segment.seq == 1]
        assert [p.segment.feedback for p in before] == [[], [(0, 2)]], "newer feedback supersedes"

        training.proposed(training.knows)
        requested = training.leader.seq
        running = training.adopt()
        version = switch(store, bus_url, run, "chronica", window=32)
        training.report(running)
        segment = training.proposed(lambda s: s.version == version)
        assert segment.seq == requested + 1
        assert segment.first_step - running.first_step <= 4
        assert segment.shuffled and segment.policy == "chronica"
        taken = training.adopt()
        # The controller may have offered the segment after it already.
        offered = [p.segment for p in training.proposals() if p.segment.seq == taken.seq]
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
        publish(training.bus, TELEMETRY, RunState("finished", 1.0, "node"), run)
        until(lambda: not leased(store), "the controller to give its lease back")
        assert not [p for p in training.proposals() if p.segment.seq >= ended], "epochs are done"


def leased(store: Store) -> list[str]:
    """Owners."""
    with store.read() as connection:
        return list(connection.scalars(sa.select(schema.leases.c.owner)))


@pytest.mark.parametrize(
    ("step_s", "steps"), [(3.0, 1), (0.33, 3), (0.1, 4), (0.02, 12), (1e-4, 64)]
)
def test_segments_last_about_a_second_but_few_steps(
    store: Store, bus_url: str, step_s: float, steps: int
) -> None:
    """Very fast steps: a quarter of a second, so that the controller keeps up."""
    run = new_run(store)
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS, global_batch=4, step_s=step_s) as training,
    ):
        assert [s.steps for s in training.follow(3)] == [2, steps, steps]
        training.assert_exact()


def test_segments_adapt_when_steps_become_faster(store: Store, bus_url: str) -> None:
    run = new_run(store)
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS, global_batch=8, step_s=0.5) as training,
    ):
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
        with working(manager(store, bus_url).run):
            training.follow(3)
        training.report(training.adopt())  # perhaps its last proposal
        training.coast(2)  # nobody plans: in the last shares
        assert training.segments[-1].shares == training.segments[-3].shares != []
        with working(manager(store, bus_url, "two").run):
            after = training.follow(4)
        assert after[0].shuffled, "a controller that takes over shuffles"
        training.assert_exact()
        assert training.epoch == 1


def test_lookahead_adopts_before_the_steps_run(store: Store, bus_url: str) -> None:
    """Data loader workers read ahead: segments are adopted while earlier ones have no feedback."""
    run = new_run(store, "chronica")
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS, lookahead=4) as training,
    ):
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
from paceline_backend.store import Store
database, bus, owner, lease_s = sys.argv[1:]
with Store.open(database) as store:
    ControllerManager(store, bus, owner, lease_s=float(lease_s)).run(threading.Event())
"""


def test_a_killed_controller_is_replaced(store: Store, database_url: str, bus_url: str) -> None:
    """kill -9 in mid-epoch: another takes over once the lease expires, and no sample is lost."""
    run = new_run(store, "chronica")
    children = {
        owner: subprocess.Popen(
            [sys.executable, "-c", _MANAGER, database_url, bus_url, owner, "1.5"],
            preexec_fn=die_with_parent,
        )
        for owner in ("first", "second")
    }
    try:
        with (
            working(ingest(store, bus_url)),
            Leading(bus_url, run, SIZES, SPEEDS) as training,
        ):
            training.follow(3)
            training.proposed(training.knows)
            killed = training.proposals()[-1].controller
            os.kill(children[killed].pid, signal.SIGKILL)
            training.report(training.adopt())  # its last proposal is as valid as ever
            training.report(training.adopt())  # coasted, unless the machine is slow
            (survivor,) = children.keys() - {killed}
            offer = training.proposed()
            assert training.proposals()[-1].controller == survivor
            assert offer.shuffled
            training.follow(4)
            training.assert_exact()
            assert training.epoch == 1
            owners = [p.controller for p in training.proposals()]
            assert owners == sorted(owners, key=lambda o: o == survivor), "never both at once"
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def test_a_new_attempt_starts_over(store: Store, bus_url: str) -> None:
    """After a restart the leader says where it resumes: planning goes on from there."""
    run = new_run(store, "chronica")
    with working(ingest(store, bus_url), manager(store, bus_url).run):
        with Leading(bus_url, run, SIZES, SPEEDS) as training:
            training.follow(3)
            used = np.concatenate([np.frombuffer(s.indices, "<u4") for s in training.segments])
            step = training.reported + 1
        used = used.astype(np.int64)
        with Leading(bus_url, run, SIZES, SPEEDS, attempt=1, step=step, used=used) as again:
            first = again.proposed()
            assert (first.seq, first.first_step, first.feedback) == (0, step, [])
            while again.epoch == 0:
                again.follow(1)
            rest = np.concatenate([np.frombuffer(s.indices, "<u4") for s in again.segments])
            assert sorted([*used, *rest]) == list(range(len(SIZES)))


def test_a_gap_in_the_live_stream_is_filled_from_the_database(store: Store, bus_url: str) -> None:
    run = new_run(store, "chronica")
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
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
        working(ingest(store, bus.url), manager(store, bus.url).run),
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
            working(ingest(store, bus_url), manager(store, bus_url, lease_s=1.0).run),
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


def test_an_unknown_policy_leaves_the_leader_coasting(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(store, "not-installed-here")
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        until(lambda: "no policy 'not-installed-here'" in caplog.text, "the reason in the log")
        training.coast(2)
        assert training.proposals() == []


def test_after_a_policy_that_cannot_be_made_another_plans(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = new_run(store, "chronica", window="long")
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        until(lambda: "parameters.window: 'long'" in caplog.text, "the reason in the log")
        training.coast(2)
        switch(store, bus_url, run, "bsp")
        assert training.follow(2)[-1].policy == "bsp"
    assert caplog.text.count("parameters.window: 'long'") == 1
    assert "Traceback" not in caplog.text


def test_no_poison_on_the_live_stream_ends_a_controller(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As an ingest of an older release would publish it; what ends a run is left out."""
    bad = {n: f for n, f in poison.TELEMETRY.items() if n not in poison.STATES}
    run = new_run(store, "chronica")
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS, epochs=2) as training,
    ):
        training.follow(2)
        for fields in bad.values():
            entry: Any = {**fields, b"run": run.encode()}
            training.bus.xadd(live(run), entry)
        assert all(not segment.shuffled for segment in training.follow(3)), "it did not start anew"
        training.assert_exact()
    assert "failed" not in caplog.text and "starts anew" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert lines and len(lines) == len(set(lines))
    assert any("groups" in line or "counts" in line for line in lines)


def test_a_plan_that_fails_ends_no_controller(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = controller.offer, iter(range(2))

    def offer(*arguments: Any) -> Any:
        if next(failing, None) is not None:
            raise KeyError("surprise")
        return real(*arguments)

    monkeypatch.setattr(controller, "offer", offer)
    run = new_run(store)
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        until(lambda: "KeyError: 'surprise'" in caplog.text, "the reason in the log")
        training.coast(2)
        training.follow(2)
    assert caplog.text.count("nothing is planned until more is known") == 1
    assert "starts anew" not in caplog.text


def test_a_controller_that_fails_unexpectedly_starts_anew(
    store: Store, bus_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failing = Controller._hear, iter(range(1))

    def hear(self: Controller, message: Any) -> None:
        if next(failing, None) is not None:
            raise KeyError("surprise")
        real(self, message)

    monkeypatch.setattr(Controller, "_hear", hear)
    monkeypatch.setattr(controller, "_AGAIN_S", 0.01)
    run = new_run(store)
    with (
        working(ingest(store, bus_url), manager(store, bus_url).run),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        training.follow(1)
        until(lambda: "starts anew: KeyError: 'surprise'" in caplog.text, "the reason in the log")
        training.follow(2)
    assert "its leader coasts" not in caplog.text, "the manager was not needed"


def test_records_of_ranks_and_steps_that_there_are_not_do_not_count() -> None:
    window = Window(world=2, attempt=0)
    window.add([record(step, rank) for step in (-1, 3) for rank in (0, 1, 2, -1, 2**31)])
    assert window.ranges() == [(3, 4)]


def test_other_runs_messages_are_not_ours(store: Store, bus_url: str) -> None:
    """Two runs at once, each planned by its own controller."""
    with working(ingest(store, bus_url), manager(store, bus_url).run):
        runs = [new_run(store, policy) for policy in ("bsp", "chronica")]
        with (
            Leading(bus_url, runs[0], SIZES, SPEEDS) as one,
            Leading(bus_url, runs[1], SIZES[:300], SPEEDS[:2]) as two,
        ):
            for _ in range(3):
                one.follow(1)
                two.follow(1)
            assert {s.policy for s in one.segments} == {"bsp"}
            assert {s.policy for s in two.segments} == {"chronica"}
            assert {len(s.counts[0]) for s in two.segments} == {2}
        assert live(runs[0]) != live(runs[1])


def segment(seq: int, epoch: int = 0, *, end: bool = False) -> Adopted:
    return adopted(seq, 2 * seq, epoch=epoch, epoch_end=end)


def test_feedback_of_another_attempt_does_not_count() -> None:
    window = Window(world=2, attempt=1)
    window.add([record(5, 0, attempt=0), record(5, 1, attempt=1), record(6, 0, 1)])
    assert window.newest == -1
    window.add([record(6, 1, 1), record(6, 1, 1), record(5, 0, 1)])
    assert window.ranges() == [(5, 7)]
    assert window.feedback().rank.tolist() == [0, 1, 0, 1]


def test_feedback_is_of_the_last_64_complete_steps() -> None:
    window = Window(world=1, attempt=0)
    window.add([record(step, 0) for step in range(100) if step != 80])
    assert window.ranges() == [(35, 80), (81, 100)]
    assert len(window.feedback()) == 64
    window.add([record(3, 0)])
    assert window.ranges() == [(35, 80), (81, 100)], "too old to come back"


def test_a_rank_whose_records_never_come_costs_no_memory() -> None:
    window = Window(world=2, attempt=0)
    window.add([record(0, rank) for rank in range(2)])
    for step in range(1, 1000):
        window.add([record(step, 0)])
    assert len(window._rows) <= 1 + 2 * 64 + 1
    assert window.ranges() == [(0, 1)]
    window.add([record(500, 1), record(999, 1)])
    assert window.ranges() == [(0, 1), (999, 1000)], "500 is given up"


def test_a_rank_that_gets_no_samples_keeps_its_last_rows() -> None:
    window = Window(world=2, attempt=0)
    starved: dict[str, Any] = {"samples": 0, "load": 0.0}

    def train(step: int, rest: dict[str, Any]) -> None:
        window.add([record(step, 0), record(step, 1, **rest)])

    for step in range(12):
        train(step, {})
    for step in range(12, 200):
        train(step, starved)
    assert window.ranges() == [(4, 12), (136, 200)]
    feedback = window.feedback()
    assert len(feedback) == 2 * (8 + 64)
    assert feedback.of(1).step.tolist() == list(range(4, 12))
    train(200, {})
    assert window.ranges() == [(5, 12), (137, 201)]
    for step in range(201, 11 + 1024):
        train(step, starved)
    assert window.ranges()[0] == (11, 12)
    for step in range(11 + 1024, 200 + 1024):
        train(step, starved)
    assert window.ranges()[0] == (200, 201)
    train(200 + 1024, starved)
    assert window.ranges() == [(1161, 1225)], "so old that the rank is tried again"


def test_history_is_lost_after_a_gap_until_an_epoch_was_seen_whole() -> None:
    """Who used a sample in the gap is not known before each has been used again."""
    history = History(hello())
    history.adopt(segment(0).segment)
    lost = []
    for later in (segment(2), segment(3, end=True), segment(4, epoch=1)):
        history.adopt(later.segment)
        lost.append(history.lost)
    parts = [[np.arange(4 + k, 32, 2) for k in range(2)]]
    counts, indices = pack_indices(parts)
    whole = adopted(5, 10, epoch=1, epoch_end=True, counts=counts, indices=indices)
    history.adopt(whole.segment)
    assert [*lost, history.lost] == [True, True, True, False]
    assert (history.epoch, history.seq, history.step) == (2, 6, 11)
    assert len(history.problem(1, 0, shuffle=True).remaining) == 32


def test_an_epoch_that_the_script_left_early() -> None:
    history = History(hello())
    history.adopt(segment(0).segment)
    assert len(history.problem(1, 0, shuffle=True).remaining) == 28
    history.adopt(segment(1, epoch=1).segment)
    assert not history.lost
    assert history.epoch == 1
    assert len(history.problem(1, 0, shuffle=True).remaining) == 28


def test_placement_given_to_the_shuffler_is_who_used_a_sample_last() -> None:
    history = History(hello())
    before = history.problem(1, 0, shuffle=True).placement
    assert before.tolist() == [i % 2 for i in range(32)]
    made = plan(
        policies.make("bsp"), history.problem(1, 0, shuffle=True), Feedback.empty(), shuffle=True
    )
    history.shuffled(0, replace(made, placement=np.zeros(32, np.int64)))
    assert not history.must_shuffle(0)
    assert history.must_shuffle(1)
    history.adopt(segment(0).segment)  # 0, 1 and 3 on rank 0, 2 on rank 1
    assert history.problem(1, 0, shuffle=False).placement.tolist() == [0] * 32
    assert history.problem(1, 0, shuffle=True).placement[:5].tolist() == [0, 0, 1, 0, 0]
    history.adopt(segment(1, end=True).segment)
    assert history.must_shuffle(0)
