"""What an attack on an earlier state broke, one test for each thing: the bus's messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import redis

from paceline.wire import TELEMETRY, Proposal, RunState, State, StepBatch, control, encode, live
from paceline.wire.bus import publish
from paceline_backend.control import ControllerManager
from paceline_backend.requests.rejected import REJECTED
from paceline_backend.store import Store, runs
from support import poison
from support.cluster import plaid_like
from support.ingesting import reasons
from support.leading import Leading, ingest, new_run, planning, working
from support.records import adopted, record
from support.waiting import until
from support.web import serving

SIZES = plaid_like(860)
SPEEDS = np.array([1.0, 1.0, 1.5, 3.0]) * 1e-5


def write(bus: redis.Redis, stream: str, data: bytes, run: str) -> None:
    fields: Any = poison.fields(data, run.encode())
    bus.xadd(stream, fields)


ADOPTED = [
    poison.in_synchroniser(adopted(0, 0), {1: 2}, "partial"),
    poison.in_synchroniser(adopted(0, 0), {"x": poison.EXTENSION}, "partial"),
    poison.in_synchroniser(adopted(0, 0), {"x": poison.NESTED}, "partial"),
    poison.in_segment(adopted(0, 0), memory={"x": poison.NESTED_MAPS}),
]


def test_1_poison_of_one_run_stops_neither_ingest_nor_plans_of_another(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    thief, run = new_run(store), new_run(store)
    manager = ControllerManager(store, bus_url, "one", lease_s=5.0)
    with (
        working(ingest(store, bus_url), planning(manager)),
        Leading(bus_url, run, SIZES, SPEEDS) as training,
    ):
        training.follow(1)
        for data in ADOPTED:
            write(bus, TELEMETRY, data, thief)
            write(bus, TELEMETRY, data, run)
            training.follow(1)
        training.stored(store)
        training.assert_exact()
    assert len(reasons(bus)) == 2 * len(ADOPTED)


@pytest.mark.parametrize("run", ["../../../x", "..", "x/y", "\0", "x" * 100_000, "ghost"])
def test_4_what_is_no_run_gets_neither_rows_nor_streams(
    store: Store, bus: redis.Redis, bus_url: str, run: str
) -> None:
    """That no agent makes a directory of it, tests/integration/node/test_agent.py shows."""
    before = {TELEMETRY, REJECTED, f"{REJECTED}:{TELEMETRY}"}
    with working(ingest(store, bus_url)):
        publish(bus, TELEMETRY, RunState(State.RUNNING, 5.0, "n"), run)
        until(lambda: bus.xlen(REJECTED) == 1, "it is rejected")
    assert {key.decode() for key in bus.scan_iter()} <= before
    assert runs.page(store)[0] == []
    [reason] = reasons(bus)
    assert reason.startswith("unknown run ")
    assert len(reason) <= 2_000


def test_7_a_plan_whose_groups_are_a_number_is_refused_and_the_leader_coasts(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    run = new_run(store)
    with Leading(bus_url, run, SIZES, SPEEDS) as training:
        for groups in (5, [5], "all", {"a": 1}, None):
            rules = {"every": 2, "probes": 1, "staleness": 4, "mean": True, "groups": groups}
            forged = Proposal(0, adopted(training.leader.seq, 0).plan, "thief")
            write(bus, control(run), poison.in_synchroniser(forged, rules), run)
        training.coast(3)
        training.assert_exact()


def test_8_ranks_that_there_are_not_end_no_controller_and_break_no_page(
    store: Store, bus: redis.Redis, bus_url: str
) -> None:
    run = new_run(store, "chronica")
    manager = ControllerManager(store, bus_url, "one", lease_s=5.0)
    ranks = (4, 5, 2**16, 2**31 - 1)

    def forge(step: int) -> None:
        for rank in ranks:
            publish(bus, TELEMETRY, StepBatch([record(step, rank)]), run)
            # As another writer of the live stream would put it there, past ingest.
            fields: Any = encode(StepBatch([record(step, rank)]), run)
            bus.xadd(live(run), fields)

    with working(ingest(store, bus_url), planning(manager)):
        forge(0)  # before the Hello
        with Leading(bus_url, run, SIZES, SPEEDS) as training:
            planned = training.follow(2)
            forge(0)
            forge(1)
            planned += training.follow(8)
            training.stored(store)
            training.assert_exact()
    assert {plan.source for plan in planned} == {"controller"}
    assert len(reasons(bus)) == 3 * len(ranks)
    with serving(store, bus_url) as client:
        for page in ("coverage", "report", "workers", "attribution", "view"):
            answer = client.get(f"/api/v1/runs/{run}/{page}")
            assert answer.status_code == 200, (page, answer.text)
        workers = client.get(f"/api/v1/runs/{run}/workers").json()
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
