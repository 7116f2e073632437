"""Plans computed again from the database are the plans that ran (docs/invariants.md, item 6)."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest
import sqlalchemy as sa

from paceline.planning.history import History
from paceline.wire import ALLREDUCE, Plan
from paceline_backend.control import ControllerManager
from paceline_backend.insight.replay import ReplayReport, replay, replay_command
from paceline_backend.store import Store, blobs, runs, schema, telemetry
from paceline_backend.store.runs import UnknownRunError
from support.cluster import plaid_like
from support.leading import Leading, ingest, new_run, planning, switch, working
from support.records import add_run
from support.waiting import DEADLINE_S

SIZES = plaid_like(300)
SPEEDS = np.array([1.0, 1.5, 3.0]) * 1e-5


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with Store.open(database_url) as opened:
        yield opened


def eventful(store: Store, bus_url: str) -> str:
    """A run with switches there and back, coasting, a takeover and two epochs; its id."""
    run = new_run(store)
    with (
        working(ingest(store, bus_url)),
        Leading(bus_url, run, SIZES, SPEEDS, global_batch=32) as training,
    ):
        with working(planning(ControllerManager(store, bus_url, "one"))):
            training.follow(2)
            version = switch(store, bus_url, run, "chronica")
            training.proposed(lambda s: s.version == version)
            training.follow(2)
        training.report(training.adopt())
        training.coast(1)
        with working(planning(ControllerManager(store, bus_url, "two"))):
            training.follow(4)
            version = switch(store, bus_url, run, "chronica", picks="paper", ett="per-sample")
            training.proposed(lambda s: s.version == version)
            training.follow(3)
            version = switch(store, bus_url, run, "bsp")
            training.proposed(lambda s: s.version == version)
            training.follow(1)
        training.stored(store)
        training.assert_exact()
        assert training.epoch >= 1
    return run


def tamper(store: Store, run: str) -> int:
    """Changes who gets the first sample of a planned segment; its seq."""
    c = schema.segments.c
    with store.write() as connection:
        query = sa.select(c.seq, c.body).where(c.source == "controller").order_by(c.seq.desc())
        seq, body = connection.execute(query.limit(1)).one()
        plan = blobs.unpack(body, Plan)
        indices = np.frombuffer(plan.indices, "<u4").copy()
        indices[[0, -1]] = indices[[-1, 0]]
        changed = msgspec.structs.replace(plan, indices=indices.tobytes())
        update = sa.update(schema.segments).where(c.seq == seq)
        connection.execute(update.values(body=blobs.pack(changed)))
    return int(seq)


def test_every_plan_comes_out_the_same(
    store: Store, bus_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = eventful(store, bus_url)
    report = replay(store, run)
    assert report.exact
    assert report.first_difference is None
    assert report.segments >= 12
    assert report.coasted >= 1
    assert report == replace(report, identical=report.segments, unknown=0, earlier=0)

    url = store.url.render_as_string(hide_password=False)
    assert replay_command(url, run[:10], json_output=True) == 0
    assert json.loads(capsys.readouterr().out)["exact"] is True

    seq = tamper(store, run)
    changed = replay(store, run)
    assert changed.identical == report.identical - 1
    assert changed.first_difference is not None
    assert changed.first_difference.startswith(f"segment {seq} ")
    assert "indices differ. indices: [0] " in changed.first_difference
    assert replay_command(url, run, json_output=False) == 1
    assert f"first difference: segment {seq} " in capsys.readouterr().out

    with store.write() as connection:
        connection.execute(sa.delete(schema.worker_steps).where(schema.worker_steps.c.step == 3))
    without = replay(store, run)
    assert without.unknown > 0
    assert not without.exact

    with store.read() as connection:
        hello = runs.hello(connection, runs.key_of(connection, run))
    assert hello is not None
    telemetry.write(store, [(run, msgspec.structs.replace(hello, attempt=1))])
    assert replay_command(url, run, json_output=False) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "the same plan for 0 of 0 planned segments" in first
    assert f"{report.segments} plans of" in first
    assert "earlier attempts are not covered" in first


def test_the_choice_of_a_synchroniser_comes_out_the_same(store: Store, bus_url: str) -> None:
    """With its memory: across coasting, a takeover and a switch away and back."""
    chooses = {"saving": 0.0, "hold": 2, "steps": 64, "batches": "bsp"}
    run = new_run(store, "paceline-relaxed", **chooses)
    sizes = np.random.default_rng(0).exponential(100, 2_000)  # three ranks of which each is slow
    with (
        working(ingest(store, bus_url)),
        Leading(bus_url, run, sizes, np.full(3, 1e-5), global_batch=12, step_s=0.02) as training,
    ):
        with working(planning(ControllerManager(store, bus_url, "one"))):
            training.follow(24)
        training.report(training.adopt())  # perhaps its last proposal
        training.coast(1)
        with working(planning(ControllerManager(store, bus_url, "two"))):
            training.follow(2)
            version = switch(store, bus_url, run, "bsp")
            training.proposed(lambda s: s.version == version)
            training.follow(2)
            version = switch(store, bus_url, run, "paceline-relaxed", **chooses)
            training.proposed(lambda s: s.version == version)
            again = training.follow(6)
        training.stored(store)
    report = replay(store, run)
    assert report == replace(report, identical=report.segments, unknown=0)
    made = [plan for plan in training.segments if plan.source == "controller"]
    assert {plan.synchroniser.name for plan in made} == {"allreduce", "pairwise"}
    counts = [plan.memory["synchroniser"]["segments"] for plan in again]
    assert counts[0] == 1, "a switch begins anew"
    assert all(after in (1, before + 1) for before, after in pairwise(counts))
    assert 2 in counts, "the memory goes on"
    coasted = next(s for s in training.segments if s.source == "coast")
    assert (coasted.synchroniser.name, coasted.why) == ("pairwise", "")

    last = next(s for s in reversed(made) if s.synchroniser.name == "pairwise")
    with store.write() as connection:
        changed = msgspec.structs.replace(last, synchroniser=ALLREDUCE, why="because")
        update = sa.update(schema.segments).where(schema.segments.c.seq == last.seq)
        connection.execute(update.values(body=blobs.pack(changed)))
    replayed = replay(store, run)
    assert replayed.identical == report.identical - 1
    assert replayed.first_difference is not None
    assert "synchroniser, why differ. synchroniser: Pairwise(" in replayed.first_difference
    assert replayed.first_difference.endswith("replayed, 'because' recorded")


def test_a_rank_too_slow_for_samples_stays_known_across_a_takeover(
    store: Store, bus_url: str
) -> None:
    """The rows that tell its speed are older than the window; the segments name them."""
    run = new_run(store, "chronica")
    speeds = np.array([1.0, 1.0, 1.0, 16.0]) * 1e-5
    sizes = plaid_like(4_000)
    with (
        working(ingest(store, bus_url)),
        Leading(bus_url, run, sizes, speeds, global_batch=8, step_s=0.25) as training,
    ):
        with working(planning(ControllerManager(store, bus_url, "one"))):
            training.follow(40)
        training.report(training.adopt())  # perhaps its last proposal
        with working(planning(ControllerManager(store, bus_url, "two"))):
            after = training.follow(2)
        training.stored(store)
    for plan in after:
        assert plan.feedback[0][1] <= 8, "old steps"
        assert plan.feedback[-1] == (plan.first_step - 64, plan.first_step)
        assert plan.ett_s, "the models are known"
        assert max(row[3] for row in plan.counts) == 0
    assert replay(store, run).exact


def test_a_policy_that_is_not_installed_here(
    store: Store, bus_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(store)
    with (
        working(ingest(store, bus_url), planning(ControllerManager(store, bus_url, "one"))),
        Leading(bus_url, run, SIZES, SPEEDS, global_batch=32) as training,
    ):
        training.follow(2)
        version = switch(store, bus_url, run, "chronica")
        training.proposed(lambda s: s.version == version)
        training.follow(1)
        training.stored(store)
    switch(store, bus_url, run, "never-used")
    assert replay(store, run).exact, "a version that planned nothing does not matter"

    c = schema.switches.c
    with store.write() as connection:
        query = sa.update(schema.switches).where(c.version == version)
        connection.execute(query.values(policy="elsewhere"))
    report = replay(store, run)
    assert (report.identical, report.unknown) == (2, 1)
    assert report.first_difference is not None
    assert "segment 2: its policy cannot be created here" in report.first_difference
    assert "no policy 'elsewhere'" in report.first_difference
    url = store.url.render_as_string(hide_password=False)
    assert replay_command(url, run, json_output=False) == 1
    assert "no policy 'elsewhere'" in capsys.readouterr().out


def test_a_gap_that_is_filled_after_the_next_epoch_began(
    store: Store, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spool delivers what an outage held back, after newer segments."""
    noticed, adopt = threading.Event(), History.adopt

    def noticing(history: History, plan: Plan) -> None:
        adopt(history, plan)
        if history.lost:
            noticed.set()

    monkeypatch.setattr(History, "adopt", noticing)
    run = new_run(store, "chronica")
    with (
        working(ingest(store, bus_url), planning(ControllerManager(store, bus_url, "one"))),
        Leading(bus_url, run, SIZES, SPEEDS, global_batch=32) as training,
    ):
        training.follow(2)
        training.proposed(training.knows)
        while training.epoch == 0:
            training.report(training.adopt(send=False), send=False)
        held, training.unsent = training.unsent[:-4], training.unsent[-4:]  # all but the last
        training.send()
        assert noticed.wait(DEADLINE_S), "the gap was not noticed"
        training.report(training.adopt())
        training.unsent = held
        training.send()
        training.follow(3)
        while training.epoch == 1:
            training.follow(1)
        training.stored(store)
        training.assert_exact()
    report = replay(store, run)
    assert report.coasted >= 3, "until the gap was filled"
    assert report == replace(report, identical=report.segments)


def test_runs_without_plans(store: Store) -> None:
    add_run(store, "young")
    assert replay(store, "young") == ReplayReport("young", 0, 0, 0, 0, 0, 0, None)
    with pytest.raises(UnknownRunError, match="nobody"):
        replay(store, "nobody")
