"""What nodes cost: set, listed, deleted; and wherever money is told."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

import paceline
from paceline.wire import NodeState, StepBatch
from paceline_backend.control.fleet.watch import FleetWatch
from paceline_backend.server.prices import Price, PriceError
from paceline_backend.store import Store, schema, telemetry
from paceline_backend.store.fleet.tables import waiting_days
from support.command_line import in_process
from support.records import add_run, hello, record
from support.web import serving

NEVER = threading.Event()
ON_DEMAND = {"type": "p4d", "amount": 36.0, "currency": "USD"}


@pytest.fixture
def spot(store: Store, bus_url: str) -> Iterator[httpx.Client]:
    """A run with two ranks on the node a, of type p4d, and one on b, whose type has no price."""
    now = time.time()
    for name, node_type in (("a", "p4d"), ("b", "spare parts")):
        state = NodeState(name, name, 8, 2**30, [], now, "0", ["r"], type=node_type)
        telemetry.write(store, [("", state)])
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
        for step in range(60)
        for rank in range(3)
    ]
    telemetry.write(store, [("r", StepBatch(steps))])
    with serving(store, bus_url) as client:
        yield client


def counted(store: Store) -> None:
    FleetWatch(store, "a").look(NEVER)


def put(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.put("/api/v1/prices", json=ON_DEMAND | {"since": 0} | fields)


def test_prices_are_set_listed_and_deleted(
    spot: httpx.Client, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = {"currency": None, "default": None, "prices": [], "unpriced": ["p4d", "spare parts"]}
    empty |= {"untyped": []}
    assert spot.get("/api/v1/prices").json() == empty
    made = put(spot, since=None, why="a price of the provider's").json()
    assert made["since"] == pytest.approx(time.time(), abs=60)
    assert (made["per"], made["set_by"]) == ("node", "configured")
    assert put(spot, since=None).json() == made, "the same again changes nothing"
    main = in_process(monkeypatch, capsys)
    server = ("--server", str(spot.base_url))
    code, said, _ = main("prices", "set", "p4d", "12.5 USD", "--from", "2026-01-01", *server)
    assert code == 0
    assert said.startswith("p4d costs 12.5 USD an hour of a node from 2026-01-01 00:00:00")
    assert main("prices", "set", "p4d", "12.5 USD", "--from", "2026-01-01", *server)[1] == said
    assert main("prices", "set", "b x/y", "1 USD", "--per", "worker", *server)[0] == 0
    answer = spot.get("/api/v1/prices").json()
    assert [(row["type"], row["amount"]) for row in answer["prices"]] == [
        ("b x/y", 1.0), ("p4d", 36.0), ("p4d", 12.5),
    ]  # fmt: skip
    assert (answer["currency"], answer["unpriced"]) == ("USD", ["spare parts"])
    code, listed, _ = main("prices", *server)
    assert code == 0
    assert "36 USD an hour of a node" in listed
    assert "Types of nodes without a price of their own: spare parts" in listed
    since = str(answer["prices"][1]["since"])
    assert main("prices", "delete", "p4d", "--since", since, *server)[0] == 0
    assert main("prices", "delete", "b x/y", *server)[0] == 0
    [left] = spot.get("/api/v1/prices").json()["prices"]
    assert left["amount"] == 12.5
    code, _, error = main("prices", "delete", "p3", *server)
    assert (code, "type 'p3' has no price: see GET /prices" in error) == (2, True)
    code, _, error = main("prices", "set", "p4d", "much", *server)
    assert (code, "give an amount and a currency, as '32.77 USD'" in error) == (2, True)
    changes = spot.get("/api/v1/audit").json()["items"]
    assert [change["action"] for change in changes] == [
        "price.delete", "price.delete", "price.set", "price.set", "price.set",
    ]  # fmt: skip
    assert (changes[-1]["target"], changes[-1]["why"]) == ("p4d", "a price of the provider's")
    assert changes[-1]["details"]["amount"] == 36.0
    [deleted] = changes[1]["details"]["prices"]
    assert deleted == {"since": made["since"], "amount": 36.0, "currency": "USD", "per": "node"}


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"amount": -1}, "amount", "amount is -1.0: give 0 or more"),
        ({"currency": "$"}, "currency", "currency is '$': give 1 to 10 letters"),
        ({"currency": "EUR"}, "currency", "currency is EUR: the other prices are in USD"),
        ({"since": -1}, "since", "greater than or equal to 0"),
        ({"per": "rank"}, "per", "'worker' or 'node'"),
        ({"type": ""}, "type", "at least 1 character"),
        ({"type": "x" * 201}, "type", "at most 200 characters"),
    ],
)
def test_bad_prices_are_refused(
    spot: httpx.Client, fields: dict[str, Any], field: str, words: str
) -> None:
    put(spot, type="other").raise_for_status()
    answer = put(spot, **fields)
    assert answer.status_code == 422
    [error] = answer.json()["errors"]
    assert error["field"].split(".")[-1] == field
    assert words in error["message"].replace("Input should be ", "")
    assert len(spot.get("/api/v1/prices").json()["prices"]) == 1


def test_what_is_no_number_is_refused(spot: httpx.Client) -> None:
    body = '{"type": "p4d", "amount": NaN, "currency": "USD"}'
    headers = {"Content-Type": "application/json"}
    answer = spot.put("/api/v1/prices", content=body, headers=headers)
    assert answer.status_code == 422
    assert "amount" in answer.json()["detail"]


def test_a_server_with_another_currency_does_not_start(
    spot: httpx.Client, store: Store, bus_url: str
) -> None:
    put(spot).raise_for_status()
    with (
        pytest.raises(PriceError, match=r"--hour-price 2.5 EUR: prices .* are in USD"),
        serving(store, bus_url, hour_price=Price(2.5, "EUR")),
    ):
        pass


def test_everything_that_tells_money_uses_the_nodes_own_price(
    spot: httpx.Client,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted(store)
    assert spot.get("/api/v1/runs/r").json()["cost"] is None
    assert spot.get("/api/v1/runs/r/verdict").json()["price"] is None
    assert "paceline_run_cost{" not in spot.get("/metrics").text
    put(spot).raise_for_status()
    # 40 steps are counted so far. A step of 3.6 s on a p4d costs 3.6 cents; one of its two ranks
    # waits for 2 s of it.
    steps = 40
    cost, waited = steps * 0.036, steps * 0.01
    unpriced = steps * 3.6 / 3600  # of b
    run = spot.get("/api/v1/runs/r").json()
    assert run["cost"] == {
        "amount": pytest.approx(cost),
        "waited": pytest.approx(waited),
        "currency": "USD",
        "unpriced_hours": pytest.approx(unpriced),
    }
    [group] = spot.get("/api/v1/history", params={"by": "run"}).json()
    amounts = (pytest.approx(cost), pytest.approx(waited), "USD", pytest.approx(unpriced))
    shown = tuple(group[name] for name in ("cost", "waited_cost", "currency", "unpriced_hours"))
    assert shown == amounts
    add_run(store, "newer")
    assert [run["id"] for run in spot.get("/api/v1/runs?sort=-cost").json()["items"]] == [
        *("r", "newer")
    ]
    with paceline.connect(str(spot.base_url)) as server:
        table = server.runs(sort="waited_cost").table()
        assert list(table.id) == ["r", "newer"]
        assert (table.cost[0], table.currency[0]) == (pytest.approx(cost), "USD")
        assert server.history("node").cost[0] == pytest.approx(cost)
    with store.write() as connection:
        connection.execute(sa.delete(schema.runs).where(schema.runs.c.id == "newer"))
    [listed] = spot.get("/api/v1/runs").json()["items"]
    assert listed["cost"] == run["cost"]
    assert spot.get("/api/v1/runs/r/verdict").json()["price"] is None, "b's is not known"
    put(spot, type="spare parts", amount=1.8, per="worker").raise_for_status()
    cost, waited = cost + steps * 0.0018, waited + steps * 0.001
    verdict = spot.get("/api/v1/runs/r/verdict").json()
    assert verdict["price"] == {"amount": pytest.approx((36.0 + 1.8) / 3), "currency": "USD"}
    fleet_verdict = spot.get("/api/v1/verdict").json()
    assert fleet_verdict["currency"] == "USD"
    for row in (fleet_verdict, *fleet_verdict["runs"]):
        assert row["waited_cost"] == pytest.approx(waited)
    assert fleet_verdict["runs"][0]["cost"] == pytest.approx(cost)
    spot.put("/api/v1/runs/r/tags/speech").raise_for_status()
    fleet = spot.get("/api/v1/fleet?by=tag").json()
    [group] = fleet["groups"]
    assert group["key"] == "speech"
    assert (fleet["currency"], fleet["unpriced_hours"]) == ("USD", 0.0)
    assert sum(group["waited_cost_by_day"]) == pytest.approx(waited)
    assert (group["cost"], group["waited_cost"]) == (pytest.approx(cost), pytest.approx(waited))
    assert sum(day["cost"] for day in fleet["days"]) == pytest.approx(cost)
    nodes = {node["node"]: node for node in fleet["nodes"]}
    assert (nodes["a"]["type"], nodes["b"]["type"]) == ("p4d", "spare parts")
    assert nodes["a"]["cost"] == pytest.approx(steps * 0.036)
    assert nodes["b"]["waited_cost"] == pytest.approx(steps * 0.001)
    report = spot.get("/api/v1/runs/r/report").json()["cost"]
    assert report["amount"] == pytest.approx(cost)
    assert [node["node"] for node in report["nodes"]] == ["a", "b"]
    page = spot.get("/api/v1/runs/r/report?format=html").text
    words = " ".join(re.sub(r"<[^>]+>", " ", page).split())
    assert f"Cost of its steps {cost:,.2f} USD of it {waited:,.2f} USD for waiting" in words
    metrics = spot.get("/metrics").text
    [line] = [each for each in metrics.splitlines() if each.startswith("paceline_run_cost{")]
    assert line.startswith('paceline_run_cost{currency="USD",run="r"} ')
    assert float(line.split()[-1]) == pytest.approx(cost)
    assert 'paceline_run_waited_cost{currency="USD",run="r"}' in metrics
    main = in_process(monkeypatch, capsys)
    server = ("--server", str(spot.base_url))
    assert f"{cost:,.2f} USD" in main("runs", *server)[1]
    assert f"cost          {cost:,.2f} USD, of it waiting" in main("runs", "show", "r", *server)[1]
    assert f"({waited:,.2f} USD) waited" in main("verdict", "--fleet", *server)[1]
    said = main("verdict", "r", *server)[1]
    assert re.search(r"In these steps that is [\d.e-]+ worker-hours, [\d.]+ USD\.", said)
    assert "spare parts" in main("nodes", *server)[1]


def test_a_price_that_rises_holds_from_then_on(spot: httpx.Client, store: Store) -> None:
    put(spot).raise_for_status()
    with store.read() as connection:
        query = sa.select(schema.steps.c.ended_at).where(schema.steps.c.step == 30)
        half = connection.execute(query).scalar_one()
    put(spot, amount=72.0, since=half).raise_for_status()
    counted(store)
    # Of the 40 steps that are counted, 30 are before it.
    run = spot.get("/api/v1/runs/r").json()
    assert run["cost"]["amount"] == pytest.approx(30 * 0.036 + 10 * 0.072)


def test_nodes_of_unknown_type_are_named(
    spot: httpx.Client,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    telemetry.write(store, [("", NodeState("old", "old", 8, 2**30, [], time.time(), "0"))])
    answer = spot.get("/api/v1/prices").json()
    assert (answer["unpriced"], answer["untyped"]) == (["p4d", "spare parts"], ["old"])
    said = in_process(monkeypatch, capsys)("prices", "--server", str(spot.base_url))[1]
    assert "Nodes of unknown type, which only the server's --hour-price prices: old" in said


@pytest.mark.parametrize("state", ["running", "finished"])
def test_a_simulated_run_costs_nothing(spot: httpx.Client, store: Store, state: str) -> None:
    """Its time is virtual."""
    put(spot).raise_for_status()
    put(spot, type="spare parts").raise_for_status()
    simulated = {"backend": "simulated", "state": state, "ended_at": time.time() - 100}
    with store.write() as connection:
        connection.execute(sa.update(schema.runs).values(simulated))
    counted(store)
    with store.read() as connection:
        assert connection.execute(sa.select(waiting_days)).all() == []
    assert spot.get("/api/v1/runs/r").json()["cost"] is None
    assert spot.get("/api/v1/runs/r/report").json()["cost"] is None
    assert spot.get("/api/v1/runs/r/verdict").json()["price"] is None
    fleet = spot.get("/api/v1/fleet?days=28").json()
    assert sum(each["cost"] for each in (*fleet["days"], *fleet["nodes"])) == 0.0
