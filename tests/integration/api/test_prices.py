"""The price of a worker-hour: wherever money is shown."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import httpx
import pytest
import sqlalchemy as sa

import paceline
from paceline.wire import StepBatch
from paceline_backend.control import upkeep
from paceline_backend.control.fleet import FleetWatch
from paceline_backend.server.prices import Price
from paceline_backend.store import Store, schema, telemetry
from support.command_line import in_process
from support.records import add_run, hello, record
from support.web import serving

NEVER = threading.Event()
STEPS = 60


@pytest.fixture
def trained(store: Store) -> None:
    """A run with two ranks on the node a, and one on b; two of them wait for 2 s in each step."""
    now = time.time()
    add_run(store, "r", state="running", nproc=1, nodes_max=3)
    telemetry.write(store, [("r", hello(world=3, placement=["a", "a", "b"]))])
    steps = [
        record(
            *(step, rank),
            compute_s=3.0 if rank == 1 else 1.0,
            load=40.0,
            step_s=3.6,
            sync_s=0.1 if rank == 1 else 2.1,
            ended_at=now - 400 + 4 * step,
        )
        for step in range(STEPS)
        for rank in range(3)
    ]
    telemetry.write(store, [("r", StepBatch(steps))])
    FleetWatch(store, "a").look(NEVER)
    upkeep.sum_up(store, NEVER)


@pytest.fixture
def priced(store: Store, bus_url: str, trained: None) -> Iterator[httpx.Client]:
    with serving(store, bus_url, hour_price=Price(18.0, "USD")) as client:
        yield client


def test_without_a_price_nothing_costs_money(client: httpx.Client, trained: None) -> None:
    assert client.get("/api/v1/runs/r").json()["cost"] is None
    assert client.get("/api/v1/runs/r/report").json()["cost"] is None
    assert client.get("/api/v1/runs/r/verdict").json()["price"] is None
    assert "paceline_run_cost{" not in client.get("/metrics").text
    verdict = client.get("/api/v1/verdict").json()
    assert (verdict["waited_cost"], verdict["currency"]) == (0.0, None)
    assert verdict["waited_hours"] == pytest.approx(STEPS * 4.0 / 3600)
    [group] = client.get("/api/v1/fleet").json()["groups"]
    assert (group["cost"], group["waited_cost"]) == (0.0, 0.0)
    assert group["waited_hours"] == pytest.approx(STEPS * 4.0 / 3600)
    [row] = client.get("/api/v1/history").json()
    assert (row["cost"], row["waited_cost"], row["currency"]) == (None, None, None)


def test_everything_that_tells_money_uses_the_price(
    priced: httpx.Client,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A second of a worker costs half a cent.
    cost, waited = STEPS * 3 * 3.6 * 0.005, STEPS * 4.0 * 0.005
    run = priced.get("/api/v1/runs/r").json()
    amounts = {"amount": pytest.approx(cost), "waited": pytest.approx(waited), "currency": "USD"}
    assert run["cost"] == amounts
    [group] = priced.get("/api/v1/history", params={"by": "run"}).json()
    assert group["cost"] == pytest.approx(18.0 * group["worker_hours"]) == pytest.approx(cost)
    assert (group["waited_cost"], group["currency"]) == (pytest.approx(waited), "USD")
    add_run(store, "newer")
    assert [run["id"] for run in priced.get("/api/v1/runs?sort=-cost").json()["items"]] == [
        *("r", "newer")
    ]
    with paceline.connect(str(priced.base_url)) as server:
        table = server.runs(sort="waited_cost").table()
        assert list(table.id) == ["r", "newer"]
        assert (table.cost[0], table.currency[0]) == (pytest.approx(cost), "USD")
        assert server.history("policy").cost[0] == pytest.approx(cost)
    with store.write() as connection:
        connection.execute(sa.delete(schema.runs).where(schema.runs.c.id == "newer"))
    [listed] = priced.get("/api/v1/runs").json()["items"]
    assert listed["cost"] == run["cost"]
    verdict = priced.get("/api/v1/runs/r/verdict").json()
    assert verdict["price"] == {"amount": 18.0, "currency": "USD"}
    fleet_verdict = priced.get("/api/v1/verdict").json()
    assert fleet_verdict["currency"] == "USD"
    for row in (fleet_verdict, *fleet_verdict["runs"]):
        assert row["waited_cost"] == pytest.approx(waited)
    assert fleet_verdict["runs"][0]["cost"] == pytest.approx(cost)
    priced.put("/api/v1/runs/r/tags/speech").raise_for_status()
    fleet = priced.get("/api/v1/fleet?by=tag").json()
    [group] = fleet["groups"]
    assert (group["key"], fleet["currency"]) == ("speech", "USD")
    assert (group["cost"], group["waited_cost"]) == (pytest.approx(cost), pytest.approx(waited))
    assert priced.get("/api/v1/runs/r/report").json()["cost"] == amounts
    page = priced.get("/api/v1/runs/r/report?format=html").text
    words = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert f"Cost of its steps {cost:,.2f} USD {waited:,.2f} USD of it for waiting" in words
    metrics = priced.get("/metrics").text
    [line] = [each for each in metrics.splitlines() if each.startswith("paceline_run_cost{")]
    assert line.startswith('paceline_run_cost{currency="USD",run="r"} ')
    assert float(line.split()[-1]) == pytest.approx(cost)
    assert 'paceline_run_waited_cost{currency="USD",run="r"}' in metrics
    main = in_process(monkeypatch, capsys)
    server = ("--server", str(priced.base_url))
    assert f"{cost:,.2f} USD" in main("runs", *server)[1]
    costs = f"cost          {cost:,.2f} USD, {waited:,.2f} USD of it for waiting"
    assert costs in main("runs", "show", "r", *server)[1]
    assert f"({waited:,.2f} USD) waited" in main("verdict", "--fleet", *server)[1]
    said = main("verdict", "r", *server)[1]
    assert re.search(r"In these steps that is [\d.e-]+ worker-hours, [\d.]+ USD\.", said)


def test_a_simulated_run_costs_nothing(priced: httpx.Client, store: Store) -> None:
    """Its time is virtual."""
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(backend="simulated"))
    assert priced.get("/api/v1/runs/r").json()["cost"] is None
    assert priced.get("/api/v1/runs/r/report").json()["cost"] is None
    assert priced.get("/api/v1/runs/r/verdict").json()["price"] is None
    [row] = priced.get("/api/v1/history").json()
    assert (row["simulated"], row["cost"]) == (True, None)
    verdict = priced.get("/api/v1/verdict").json()
    assert (verdict["waited_hours"], verdict["waited_cost"]) == (0.0, 0.0)
    assert priced.get("/api/v1/fleet?days=28").json()["groups"] == []
