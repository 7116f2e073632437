"""The verdict over all runs, nodes by day, and what waiting costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from paceline.wire import LongPhase, Phase, StepBatch
from paceline_backend.control import upkeep
from paceline_backend.control.fleet import FleetWatch
from paceline_backend.insight import fleet
from paceline_backend.server.prices import Price
from paceline_backend.store import Store, nodes, schema, telemetry
from paceline_backend.store.fleet import progress, verdicts
from paceline_backend.store.schema import verdicts as kept_verdicts
from support.command_line import in_process
from support.records import add_run, adopted, hello, record, run_day
from support.web import serving

NEVER = threading.Event()


def trained(store: Store, run: str, slow: float, first: int = 0, at: float = 0.0) -> None:
    """A run of three ranks on node n, of which rank 1 is so many times slower."""
    if not first:
        add_run(store, run, state="running", nproc=3, attempt=0, node="n")
        telemetry.write(store, [(run, hello(world=3))])
    records = [
        record(
            step,
            rank,
            compute_s=0.1 * slow if rank == 1 else 0.1,
            load=40.0,
            sync_s=0.02 if rank == 1 else 0.02 + 0.1 * (slow - 1),
            step_s=0.1 * slow + 0.021,
            ended_at=at + step * (0.1 * slow + 0.021),
        )
        for step in range(first, first + 60)
        for rank in range(3)
    ]
    telemetry.write(store, [(run, StepBatch(records))])


def kept_of(connection: sa.Connection, run: str) -> Sequence[sa.Row[Any]]:
    """The stored verdicts about a run, newest first."""
    c = kept_verdicts.c
    query = sa.select(kept_verdicts).where(c.run == run).order_by(c.at.desc())
    return connection.execute(query).all()


def test_the_fleets_verdict_is_that_of_its_runs(
    client: httpx.Client,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert client.get("/api/v1/verdict").json()["words"] == "No run is training."
    trained(store, "fine", 1.0)
    trained(store, "slow", 3.0)
    add_run(store, "over", state="finished")
    watch = FleetWatch(store, "worker")
    for _ in range(2):  # on a busy machine a look judges a single run
        assert watch.look(NEVER)
    upkeep.sum_up(store, NEVER)
    answer = client.get("/api/v1/verdict").json()
    assert [run["run"] for run in answer["runs"]] == ["slow", "fine"], "what costs most first"
    slow, fine = answer["runs"]
    own = client.get("/api/v1/runs/slow/verdict").json()
    assert slow["causes"] == own["causes"]
    assert (slow["level"], slow["what"], slow["share"]) == ("held-up", own["what"], own["lost_now"])
    assert slow["lost_workers"] == pytest.approx(3 * slow["share"])
    assert (fine["level"], fine["lost_workers"]) == ("healthy", 0.0)
    # Two of three ranks wait 0.2 s in each of the 60 steps.
    assert slow["waited_hours"] == pytest.approx(60 * 2 * 0.2 / 3600)
    assert answer["waited_hours"] == pytest.approx(slow["waited_hours"])
    assert answer["workers"] == 6
    [wait] = answer["waits"]
    assert (wait["kind"], wait["runs"]) == ("node", ["slow"])
    [node] = answer["nodes"]
    assert node["node"] == "n"
    [held] = node["runs"]
    assert (held["run"], held["ranks"], held["kinds"]) == ("slow", [1], ["node"])
    assert answer["words"].startswith("1 of 2 runs on 6 workers is slowed down; ")
    main = in_process(monkeypatch, capsys)
    server = ("--server", str(client.base_url))
    code, printed, _ = main("verdict", "--fleet", *server)
    assert code == 0
    assert printed.startswith(answer["words"])
    assert "slow  slow  held-up: rank 1" in printed
    assert main("verdict", "slow", "--fleet", *server)[0] == 2
    assert main("verdict", *server)[0] == 2


def test_it_names_runs_that_hang_and_that_coast(client: httpx.Client, store: Store) -> None:
    trained(store, "stands", 1.0)
    trained(store, "alone", 1.0)
    stuck = [
        LongPhase(0, rank, 60, Phase.SYNC if rank else Phase.COMPUTE, 300.0, time.time())
        for rank in range(3)
    ]
    telemetry.write(store, [("stands", each) for each in stuck])
    telemetry.write(store, [("alone", adopted(1, 0, source="coast", counts=[[1, 1, 1]]))])
    answer = client.get("/api/v1/verdict").json()
    runs = {run["run"]: run for run in answer["runs"]}
    assert (runs["stands"]["hung_s"], runs["stands"]["coasting"]) == (300.0, False)
    assert (runs["alone"]["hung_s"], runs["alone"]["coasting"]) == (0.0, True)
    assert answer["words"] == f"1 of 2 runs on 6 workers hangs: {runs['stands']['name']}."


def test_a_run_whose_loss_allows_equal_parts_alone_says_so(
    client: httpx.Client, store: Store
) -> None:
    """It does not coast, and nobody chose its synchroniser."""
    trained(store, "equal", 1.0)
    why = "No loss_mean fits the loss. Mask padded positions."
    part = adopted(1, 0, source="equal", why=why, counts=[[1, 1, 1]])
    telemetry.write(store, [("equal", part)])
    url = "/api/v1/runs/equal"
    notice = f"Ranks train with equal local batches, whatever the policy: {why}"
    assert client.get(url).json()["notice"] == notice
    assert client.get(f"{url}/coasts").json() == []
    assert client.get(f"{url}/synchronisation").json()["chosen"] == []
    [run] = client.get("/api/v1/verdict").json()["runs"]
    assert run["coasting"] is False
    assert "paceline_run_coasting{" + 'run="equal"} 0.0' in client.get("/metrics").text


def test_a_verdict_is_a_row_until_it_names_something_else(store: Store) -> None:
    trained(store, "r", 3.0)
    FleetWatch(store, "a").look(NEVER)
    trained(store, "r", 3.0, first=60)
    FleetWatch(store, "a").look(NEVER)
    with store.read() as connection:
        [kept] = kept_of(connection, "r")
    assert kept.body["to"] == 119
    assert kept.at < kept.until
    for first in range(120, 660, 60):
        trained(store, "r", 1.0, first=first)
    FleetWatch(store, "a").look(NEVER)
    with store.read() as connection:
        newest, before = kept_of(connection, "r")
    assert before == kept
    assert newest.nodes == {}


def test_steps_that_a_restart_undid_do_not_count(store: Store) -> None:
    """The run trained steps 0 to 59, was restarted from step 20, and is at step 29 again."""
    trained(store, "r", 1.0)
    telemetry.write(store, [("r", hello(world=3, attempt=1, epoch=0, step=20))])
    again = [record(step, rank, attempt=1) for step in range(20, 30) for rank in range(3)]
    telemetry.write(store, [("r", StepBatch(again))])
    with store.read() as connection:
        [run] = progress.running(connection)
    assert (run.attempt, run.step) == (1, 29)


def test_of_two_workers_one_looks(store: Store) -> None:
    trained(store, "r", 3.0)
    assert FleetWatch(store, "first").look(NEVER)
    assert not FleetWatch(store, "second").look(NEVER)


def test_a_verdict_lasts_while_the_run_trains_without_a_new_step(store: Store) -> None:
    trained(store, "r", 3.0)
    time_s = [0.0]
    watch = FleetWatch(store, "a", clock=lambda: time_s[0])
    watch.look(NEVER)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE verdicts SET at = at - 90, until = until - 90"))
    with store.read() as connection:
        [before] = kept_of(connection, "r")
    time_s[0] = 11.0
    watch.look(NEVER)
    with store.read() as connection:
        [kept] = kept_of(connection, "r")
    assert kept.at == before.at
    assert kept.until - before.until == pytest.approx(90.0, abs=30.0)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE verdicts SET at = at - 90, until = until - 90"))
    trained(store, "r", 3.0, first=60)
    time_s[0] = 22.0
    watch.look(NEVER)
    with store.read() as connection:
        [kept] = kept_of(connection, "r")
    assert kept.body["to"] == 119


def test_a_verdict_goes_on_no_longer_when_a_step_is_overdue(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until() -> float:
        """The end of the verdict, after another look at a time by the watch's clock."""
        with store.write() as connection:
            connection.execute(sa.update(kept_verdicts).values(until=time.time() - 60.0))
        watch.look(NEVER)
        with store.read() as connection:
            return kept_of(connection, "r")[0].until

    trained(store, "r", 3.0)
    time_s = [0.0]
    watch = FleetWatch(store, "a", clock=lambda: time_s[0])
    watch.look(NEVER)
    time_s[0] = 590.0
    assert until() == pytest.approx(time.time(), abs=30.0)
    time_s[0] = 601.0
    assert until() < time.time() - 30.0
    # What cannot be judged any more has no verdict that could go on.
    monkeypatch.setattr("paceline_backend.control.fleet.judged", lambda *_: None)
    trained(store, "r", 3.0, first=60)
    for time_s[0] in (620.0, 640.0):
        assert until() < time.time() - 30.0


def test_a_verdict_does_not_last_over_a_time_without_looks(store: Store) -> None:
    trained(store, "r", 3.0)
    FleetWatch(store, "a").look(NEVER)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE verdicts SET at = at - 900, until = until - 900"))
        [before] = kept_of(connection, "r")
        verdicts.go_on(connection, "r", before.until + 900.0, 120.0)
        assert kept_of(connection, "r") == [before]
        verdicts.go_on(connection, "r", before.until + 900.0, 1_000.0)
        [kept] = kept_of(connection, "r")
    assert kept.until == before.until + 900.0


def test_old_verdicts_are_forgotten(store: Store) -> None:
    trained(store, "old", 3.0)
    FleetWatch(store, "a").look(NEVER)
    with store.write() as connection:
        old = "UPDATE verdicts SET at = at - 40000000, until = until - 40000000"
        connection.execute(sa.text(old))
        connection.execute(sa.update(schema.runs).values(state="finished"))
    FleetWatch(store, "a").look(NEVER)
    with store.read() as connection:
        assert kept_of(connection, "old") == []


def test_the_record_of_nodes_and_costs(store: Store, bus_url: str) -> None:
    now = time.time()
    trained(store, "slow", 3.0, at=now - 60.0)
    with store.write() as connection:
        nodes.expect(connection, "n")
        connection.execute(sa.update(schema.nodes).values(heartbeat_at=now, left=False))
        connection.execute(
            sa.insert(schema.cordons).values(node="n", at=now, by="ada", reason="its disk is slow")
        )
    FleetWatch(store, "a").look(NEVER)
    upkeep.sum_up(store, NEVER)
    with store.write() as connection:
        connection.execute(sa.text("UPDATE verdicts SET at = until - 1800"))
    with serving(store, bus_url, hour_price=Price(2.5, "EUR")) as client:
        answer = client.get("/api/v1/fleet?days=7").json()
        by_run = client.get("/api/v1/fleet?days=7&by=run").json()["groups"]
        verdict = client.get("/api/v1/runs/slow/verdict").json()
    assert verdict["price"] == {"amount": 2.5, "currency": "EUR"}
    [node] = answer["nodes"]
    assert (node["node"], node["runs"]) == ("n", ["slow"])
    assert node["cordoned"] == {"by": "ada", "at": pytest.approx(now), "reason": "its disk is slow"}
    assert len(node["hours"]) == 7
    assert sum(node["hours"]) == pytest.approx(0.5, abs=1e-3)
    assert answer["currency"] == "EUR"
    [group] = answer["groups"]
    assert (group["key"], group["runs"]) == ("", 1)
    assert group["worker_hours"] == pytest.approx(60 * 3 * 0.321 / 3600)
    assert group["waited_hours"] == pytest.approx(60 * 0.4 / 3600)
    assert group["cost"] == pytest.approx(2.5 * group["worker_hours"])
    assert group["waited_cost"] == pytest.approx(2.5 * group["waited_hours"])
    assert [(each["key"], each["runs"]) for each in by_run] == [("slow", 1)]


def test_costs_are_added_up_by_tag(client: httpx.Client, store: Store) -> None:
    now = time.time()
    for run in ("both", "speech", "none", "old"):
        trained(store, run, 3.0, at=now - (9 * 86_400.0 if run == "old" else 60.0))
    upkeep.sum_up(store, NEVER)
    for run, tag in (("both", "nightly"), ("both", "speech"), ("speech", "speech")):
        client.put(f"/api/v1/runs/{run}/tags/{tag}").raise_for_status()
    answer = client.get("/api/v1/fleet?days=7&by=tag").json()
    waited = 60 * 0.4 / 3600
    assert [(group["key"], group["runs"]) for group in answer["groups"]] == [
        ("speech", 2), ("nightly", 1), ("", 1),
    ]  # fmt: skip
    for group in answer["groups"]:
        assert group["waited_hours"] == pytest.approx(waited * group["runs"])


def test_of_many_groups_the_cheapest_are_one(store: Store) -> None:
    today = int(time.time() // 86_400)
    keys = [add_run(store, f"r{number}") for number in range(103)]
    rows = [
        run_day(today - day, key, 3600.0, 1800.0 if key == keys[7] else 18.0)
        for key in keys
        for day in (0, 1)
    ]
    with store.write() as connection:
        connection.execute(sa.insert(schema.run_days), rows)
    with store.read() as connection:
        groups = fleet.record(connection, 2, "run", time.time())["groups"]
    assert len(groups) == 100
    assert groups[0]["key"] == "r7"
    rest = groups[-1]
    assert (rest["key"], rest["runs"]) == (None, 4)
    assert rest["waited_hours"] == pytest.approx(4 * 0.01)
    assert rest["worker_hours"] == pytest.approx(8.0)


def test_a_price_is_an_amount_with_a_currency() -> None:
    assert Price.of("2.50 EUR") == Price(2.5, "EUR")
    assert Price.of(None) is Price.of("") is None
    assert Price.of(Price(2.5, "EUR").text) == Price(2.5, "EUR")
    for text in ("EUR", "2.5", "-1 EUR", "nan EUR", "2 3"):
        with pytest.raises(Exception, match="--hour-price"):
            Price.of(text)
