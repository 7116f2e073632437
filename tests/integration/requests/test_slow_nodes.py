"""Cordons, spares and replacements over REST: what is refused, launched, audited and shown."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import redis

from paceline.wire import Kill, Launch, State
from paceline_backend.control.multi_node import NodeReconciler
from paceline_backend.store import Store, nodes, telemetry
from support.groups import answer, orders, ready, report
from support.records import hello

BODY = {"script": "train.py", "nproc": 1, "nodes_min": 2, "nodes_max": 2, "policy": "bsp"}


def detail(refused: httpx.Response, status: int = 409) -> str:
    assert refused.status_code == status, refused.text
    return str(refused.json()["detail"])


def shown(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {node["id"]: node for node in client.get("nodes").json()}


def launched(client: httpx.Client, **fields: Any) -> str:
    made = client.post("runs", json=BODY | fields)
    assert made.status_code == 201, made.text
    return str(made.json()["id"])


def training(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str, **fields: Any
) -> str:
    """A run that trains on n1, which serves the rendezvous, and on n2."""
    run = launched(client, **fields)
    reconciler = NodeReconciler(store, bus_url)
    for node in ("n1", "n2"):
        ready(store, run, node)
        reconciler.look(bus)
        reconciler.look(bus)
    telemetry.write(store, [(run, hello(world=2, placement=["n1", "n2"]))])
    for node in ("n1", "n2"):
        report(store, run, node, State.RUNNING)
    return run


def rows(client: httpx.Client, run: str) -> dict[str, dict[str, Any]]:
    return {row["node"]: row for row in client.get(f"runs/{run}/nodes").json()}


def test_when_all_nodes_are_cordoned_the_reason_is_said(client: httpx.Client, store: Store) -> None:
    answer(store, "n1")
    client.put("nodes/n1/cordon", json={})
    refused = detail(client.post("runs", json=BODY | {"nodes_min": 1, "nodes_max": 1}))
    assert "node n1 is cordoned by configured: `paceline uncordon n1` lifts it" in refused


def test_spares_are_held_back(client: httpx.Client, store: Store) -> None:
    answer(store, "n1", "n2", "n3")
    run = launched(client, nodes_max=3, spares=1)
    assert sorted(rows(client, run)) == ["n1", "n2"], "one is left as a spare"
    assert shown(client)["n3"]["spare_of"] == run
    single = {"nodes_min": 1, "nodes_max": 1, "node": "n3"}
    refused = detail(client.post("runs", json=BODY | single))
    assert refused == f"node: node n3 is held back as a spare of run {run}"
    client.post(f"runs/{run}/stop", json={"force": True})
    for node in ("n1", "n2"):
        report(store, run, node, State.STOPPED)
    assert shown(client)["n3"]["spare_of"] is None
    assert client.post("runs", json=BODY | single).status_code == 201


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"spares": 1, "nodes_min": 1, "nodes_max": 1}, "spares: only for a run on several nodes"),
        ({"spares": 1, "launch": False}, "spares: only for a run that the control plane launches"),
        ({"replace_slow_nodes": True}, "replace_slow_nodes: needs spares"),
        ({"spares": -1}, "spares: "),
    ],
)
def test_spares_that_no_run_can_have_are_refused(
    client: httpx.Client, store: Store, fields: dict[str, Any], words: str
) -> None:
    answer(store, "n1", "n2", "n3")
    assert detail(client.post("runs", json=BODY | fields), 422).startswith(words)


def test_too_few_idle_nodes_are_refused(client: httpx.Client, store: Store) -> None:
    answer(store, "n1", "n2")
    assert detail(client.post("runs", json=BODY | {"spares": 1})).startswith(
        "spares: 1 idle nodes are needed besides n1, n2, and there are 0"
    )
    answer(store, "n3")
    launched(client, nodes_min=1, nodes_max=1, node="n3")
    refused = client.post("runs", json=BODY | {"spares": 1})
    assert refused.status_code == 409, "n3 is about to train"


def test_a_slow_node_makes_way_when_the_other_is_there(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """In one request, with one entry of the audit log."""
    answer(store, "n1", "n2", "n3", "n4")
    run = training(client, store, bus, bus_url, spares=1)
    [spare] = [name for name, node in shown(client).items() if node["spare_of"] == run]
    body = {"cordon": True, "why": "slow"}
    asked = client.post(f"runs/{run}/nodes/n2/replace", json=body)
    assert asked.status_code == 202, asked.text
    assert rows(client, run)[spare]["replaces"] == "n2"
    [order] = orders(bus, spare)
    assert isinstance(order, Launch)
    assert (order.nodes_min, order.nodes_max) == (2, 2)
    work = NodeReconciler(store, bus_url)
    ready(store, run, spare)
    work.look(bus)
    assert not rows(client, run)["n2"]["leaving"], "the other one is not there yet"
    report(store, run, spare, State.STARTING, arrived=True)
    work.look(bus)
    work.look(bus)
    assert rows(client, run)["n2"]["leaving"]
    kills = [order for order in orders(bus, "n2") if isinstance(order, Kill)]
    assert kills == [Kill("it was asked to leave the run", 0, leaves=True)]
    changes = client.get(f"runs/{run}/audit").json()["items"]
    assert [each["action"] for each in changes] == ["run.replace", "run.create"]
    assert (changes[0]["why"], changes[0]["details"]["other"]) == ("slow", spare)
    assert shown(client)["n2"]["cordoned"]["reason"] == "slow"
    assert shown(client)[spare]["spare_of"] is None
    [made] = client.get(f"runs/{run}/replacements").json()
    assert (made["node"], made["other"], made["state"]) == ("n2", spare, "waiting")
    report(store, run, "n2", State.STOPPED)
    later = hello(world=2, attempt=1, placement=["n1", spare])
    telemetry.write(store, [(run, later)])
    [made] = client.get(f"runs/{run}/replacements").json()
    assert (made["state"], made["first_step"]) == ("done", 0)
    gone = client.get("nodes/n2/history").json()["runs"]
    assert [(each["run"], each["asked_to_leave"]) for each in gone] == [(run, True)]


def test_a_node_stays_if_the_other_never_comes(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    answer(store, "n1", "n2", "n3")
    run = training(client, store, bus, bus_url)
    assert client.post(f"runs/{run}/nodes/n2/replace").status_code == 202
    report(store, run, "n3", State.FAILED, exit_code=1, message="no such script")
    NodeReconciler(store, bus_url).look(bus)
    assert not rows(client, run)["n2"]["leaving"]
    assert client.get(f"runs/{run}").json()["state"] == "running"
    [made] = client.get(f"runs/{run}/replacements").json()
    assert made["state"] == "failed"
    assert client.post(f"runs/{run}/nodes/n2/replace").status_code == 202, "once more"


def test_replacements_that_cannot_be_are_refused(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    answer(store, "n1", "n2", "n3")
    run = training(client, store, bus, bus_url, env={"A": "b"})

    def refused(of: str, status: int = 409, **body: Any) -> str:
        return detail(client.post(f"runs/{run}/nodes/{of}/replace", json=body), status)

    env = {"env": {"A": "b"}}
    assert "does not train on n3; its nodes are: n1, n2" in refused("n3", **env)
    assert "give them again" in refused("n2", 422)
    assert "n1 serves the rendezvous" in refused("n1", **env)
    assert f"run {run} already trains on n1" in refused("n2", node="n1", **env)
    assert "no agent with a session answers on n9" in refused("n2", node="n9", **env)
    client.put("nodes/n3/cordon", json={})
    assert "node n3 is cordoned" in refused("n2", node="n3", **env)
    assert client.post(f"runs/{run}/nodes/n2/replace", json=env).status_code == 409
    client.delete("nodes/n3/cordon")
    stale = client.post(f"runs/{run}/nodes/n2/replace", json=env, headers={"If-Match": '"7"'})
    assert stale.status_code == 412
    assert client.post(f"runs/{run}/nodes/n2/replace", json=env).status_code == 202
    assert "n3 is already replacing n2" in refused("n2", **env)


def test_a_spare_stands_in_for_a_lost_node(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    answer(store, "n1", "n2", "n3")
    run = training(client, store, bus, bus_url, spares=1)
    work = NodeReconciler(store, bus_url)
    work.look(bus)
    assert "n3" not in rows(client, run)
    with store.write() as connection:
        telemetry.lose(connection, run, "n2", "its agent does not answer")
    work.look(bus)
    work.look(bus)
    assert rows(client, run)["n3"]["replaces"] == "n2"
    assert len(orders(bus, "n3")) == 1
    change = client.get(f"runs/{run}/audit").json()["items"][0]
    assert (change["who"], change["action"]) == ("the control plane", "run.join")


def test_no_spare_joins_a_run_that_is_stopped(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """Its nodes end at different times."""
    answer(store, "n1", "n2", "n3")
    run = training(client, store, bus, bus_url, spares=1)
    assert client.post(f"runs/{run}/stop", json={"force": True}).status_code == 202
    report(store, run, "n2", State.STOPPED)
    NodeReconciler(store, bus_url).look(bus)
    assert "n3" not in rows(client, run)


def test_a_node_that_has_not_spoken_is_unknown(client: httpx.Client, store: Store) -> None:
    with store.write() as connection:
        nodes.expect(connection, "n1")
    assert detail(client.put("nodes/n1/cordon", json={}), 404) == "no node n1"


def test_a_spare_is_launched_when_the_host_is_lost(
    client: httpx.Client, store: Store, bus: redis.Redis, bus_url: str
) -> None:
    """The run is launched anew, and would have too few nodes without it."""
    answer(store, "n1", "n2", "n3")
    run = training(client, store, bus, bus_url, spares=1)
    client.put("nodes/n2/cordon", json={})  # what runs there goes on
    with store.write() as connection:
        telemetry.lose(connection, run, "n1", "its agent does not answer")
    NodeReconciler(store, bus_url).look(bus)
    assert "n3" not in rows(client, run), "the run is launched anew"
    reconciler = NodeReconciler(store, bus_url)
    reconciler.look(bus)
    report(store, run, "n2", State.FAILED, 0, message="the rendezvous at 10.0.0.1 is gone")
    reconciler.look(bus)
    reconciler.look(bus)
    again = client.get(f"runs/{run}").json()
    assert (again["state"], again["message"]) == ("pending", None)
    first = {name: row["first_attempt"] for name, row in rows(client, run).items()}
    assert first == {"n1": 0, "n2": again["first_attempt"], "n3": again["first_attempt"]}
