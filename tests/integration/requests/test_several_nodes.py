"""Runs on several nodes over REST: what is refused, where they are launched, what is shown."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import redis

from paceline.wire import Kill, Launch, State
from paceline.wire.sealing import unseal
from paceline_backend.control.checks import Checks
from paceline_backend.requests import sessions
from paceline_backend.store import Store
from support.groups import answer, orders, report
from support.records import hello

BODY = {"script": "train.py", "nproc": 2, "nodes_min": 2, "nodes_max": 3}


def test_a_run_is_launched_on_several_nodes(
    client: httpx.Client, store: Store, bus: redis.Redis
) -> None:
    """Not on one whose agent has no session."""
    answer(store, "a-old", signed=False)
    answer(store, "n1", "n2")
    made = client.post("runs", json=BODY | {"env": {"TOKEN": "secret"}})
    assert made.status_code == 201, made.text
    run = made.json()
    assert (run["nproc"], run["nodes_min"], run["nodes_max"], run["node"]) == (2, 2, 3, None)
    listed = client.get(f"runs/{run['id']}/nodes").json()
    assert [(row["node"], row["state"], row["host"]) for row in listed] == [
        ("n1", "pending", False),
        ("n2", "pending", False),
    ]
    keys = sessions.keys(store, ["n1", "n2"])
    for node in ("n1", "n2"):
        [order] = orders(bus, node)
        assert isinstance(order, Launch)
        assert (order.nproc, order.nodes_min, order.nodes_max, order.env) == (2, 2, 3, {})
        secrets = unseal(order.sealed, keys.of_node(node))
        env = {"TOKEN": "secret", "PACELINE_FIRST_POLICY": '{"paceline":{}}'}
        assert (secrets.env, secrets.key) == (env, keys.of_run(run["id"]))
    assert orders(bus, "a-old") == []


def test_the_nodes_show_what_they_report(client: httpx.Client, store: Store) -> None:
    answer(store, "n1", "n2")
    run = client.post("runs", json=BODY).json()["id"]
    report(store, run, "n2", State.RUNNING, 1, message="rank 0 was killed", at=7.0)
    first, second = client.get(f"runs/{run}/nodes").json()
    assert (first["state"], first["reported_at"]) == ("pending", None)
    shown = [second[name] for name in ("state", "attempt", "message", "reported_at")]
    assert shown == ["running", 1, "rank 0 was killed", 7.0]


def test_too_few_nodes_are_refused(client: httpx.Client, store: Store) -> None:
    answer(store, "n1")
    answer(store, "old", signed=False)
    refused = client.post("runs", json=BODY)
    assert refused.status_code == 409
    assert refused.json()["detail"].startswith(
        "nodes_min: 2 nodes are needed; agents that answer and have a session: 1 (n1); start one"
    )
    assert client.get("runs").json()["items"] == []


def test_a_run_on_several_nodes_may_be_launched_by_its_caller(client: httpx.Client) -> None:
    made = client.post("runs", json=BODY | {"launch": False})
    assert (made.status_code, made.json()["state"]) == (201, "pending")
    assert client.get(f"runs/{made.json()['id']}/nodes").json() == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"nodes_min": 4}, "nodes_min"),
        ({"nodes_min": 0}, "nodes_min"),
        ({"nodes_max": 1_001}, "nodes_max"),
        ({"nproc": 10_000, "nodes_max": 1_000}, "nodes_max"),
        ({"node": "n1"}, "node"),
    ],
)
def test_what_no_run_can_have_is_refused(
    client: httpx.Client, fields: dict[str, Any], field: str
) -> None:
    refused = client.post("runs", json=BODY | fields)
    assert refused.status_code == 422
    assert field in refused.json()["errors"][0]["field"]


def test_a_run_may_have_its_ranks_on_each_node(client: httpx.Client, store: Store) -> None:
    run = client.post("runs", json=BODY | {"launch": False}).json()["id"]
    reasons = Checks(store).reasons([(run, hello(world=6, attempt=5)), (run, hello(world=7))])
    assert reasons == [None, f"run {run}: Hello.world is 7: the run has at most 6 ranks"]


def started(client: httpx.Client, store: Store, **fields: Any) -> str:
    """A run that starts on n1 and n2; n3 is there, too."""
    answer(store, "n1", "n2")
    run = str(client.post("runs", json=BODY | {"nodes_max": 3, **fields}).json()["id"])
    for node in ("n1", "n2"):
        report(store, run, node, State.RUNNING)
    answer(store, "n3")
    return run


@pytest.mark.parametrize("wanted", [1, ["n3"]])
def test_a_node_joins(
    client: httpx.Client, store: Store, bus: redis.Redis, wanted: int | list[str]
) -> None:
    run = started(client, store, env={"A": "b"})
    assert client.post(f"runs/{run}/nodes", json={"nodes": wanted}).status_code == 422
    joined = client.post(f"runs/{run}/nodes", json={"nodes": wanted, "env": {"A": "b"}})
    assert joined.status_code == 202, joined.text
    assert [row["node"] for row in joined.json()] == ["n1", "n2", "n3"]
    [order] = orders(bus, "n3")
    assert isinstance(order, Launch)
    assert (order.attempt, order.nodes_max) == (0, 3)
    assert client.get(f"runs/{run}").json()["state"] == "running"
    assert client.get(f"runs/{run}/audit").json()["items"][0]["action"] == "run.join"
    full = client.post(f"runs/{run}/nodes", json={"nodes": 1, "env": {"A": "b"}})
    assert full.json()["detail"] == f"nodes: run {run} has 3 nodes, and may have at most 3"


def test_a_node_that_does_not_answer_cannot_join(client: httpx.Client, store: Store) -> None:
    run = started(client, store)
    answer(store, "n3", left=True)
    refused = client.post(f"runs/{run}/nodes", json={"nodes": ["n3"]})
    assert (refused.status_code, refused.json()["detail"]) == (
        409,
        "nodes: n3 cannot join; those that can: none",
    )
    assert client.post(f"runs/{run}/nodes", json={"nodes": 1}).status_code == 409


def test_a_node_leaves(client: httpx.Client, store: Store, bus: redis.Redis) -> None:
    run = started(client, store)
    refused = client.delete(f"runs/{run}/nodes/n2")
    assert refused.status_code == 409
    assert "needs 2 nodes, and without n2 it would have 1" in refused.json()["detail"]
    client.post(f"runs/{run}/nodes", json={"nodes": 1})
    assert client.delete(f"runs/{run}/nodes/n2").status_code == 202
    assert orders(bus, "n2")[-1] == Kill("it was asked to leave the run", 0, leaves=True)
    assert [len(orders(bus, node)) for node in ("n1", "n3")] == [1, 1]
    report(store, run, "n2", State.STOPPED)
    assert client.get(f"runs/{run}").json()["state"] == "running"
    assert client.delete(f"runs/{run}/nodes/n2").status_code == 409
