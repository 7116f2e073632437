"""Nodes that are measured as slow are not taken by number, only by name."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest

from paceline.wire import CheckNode, NodeCheck, NodeState, State
from paceline.wire.bus import connect
from paceline_backend.store import Store, StoreRefusedError, telemetry
from support.groups import answer, orders, ready, report
from support.web import ANY, serving

BODY = {"script": "train.py", "nproc": 1, "nodes_min": 2, "nodes_max": 3, "policy": "bsp"}


def measured(store: Store, **speeds: float) -> None:
    """Nodes answer that compute at these speeds."""
    answer(store, *speeds)
    for name, speed in speeds.items():
        say(store, name, NodeCheck(speed, 10.0, None, 5.0))


def say(store: Store, name: str, check: NodeCheck | None, *runs: str) -> None:
    """A heartbeat of a node."""
    state = NodeState(name, name, 8, 2**30, [], time.time(), "0.2.0", list(runs), check=check)
    telemetry.write(store, [("", state)])


def names(client: httpx.Client, run: str) -> list[str]:
    return [row["node"] for row in client.get(f"runs/{run}/nodes").json()]


def detail(refused: httpx.Response, status: int = 409) -> str:
    assert refused.status_code == status, refused.text
    return str(refused.json()["detail"])


def test_a_run_leaves_a_slow_node_out(client: httpx.Client, store: Store) -> None:
    measured(store, n1=40.0, n2=44.0, n3=16.0)
    made = client.post("runs", json=BODY)
    assert made.status_code == 201, made.text
    assert made.json()["join_check"] == 1.5
    assert names(client, made.json()["id"]) == ["n1", "n2"]
    refused = detail(client.post("runs", json=BODY | {"nodes_min": 3}))
    assert "n3 computes 2.5 times slower than the median of 3 nodes" in refused
    assert "`paceline check NODE`" in refused
    taken = client.post("runs", json=BODY | {"nodes_min": 3, "join_check": 0})
    assert names(client, taken.json()["id"]) == ["n1", "n2", "n3"]


def test_a_slow_node_joins_only_by_name(client: httpx.Client, store: Store) -> None:
    measured(store, n1=40.0, n2=44.0)
    run = client.post("runs", json=BODY).json()["id"]
    for name in ("n1", "n2"):
        ready(store, run, name)
        report(store, run, name, State.RUNNING)
    measured(store, n3=16.0)
    refused = detail(client.post(f"runs/{run}/nodes", json={"nodes": 1}))
    assert "n3 computes 2.6 times slower than the median of 2 nodes" in refused
    assert refused.endswith("name a node to accept it anyway")
    joined = client.post(f"runs/{run}/nodes", json={"nodes": ["n3"]})
    assert joined.status_code == 202, joined.text
    assert names(client, run) == ["n1", "n2", "n3"]


def test_a_node_that_was_not_measured_is_taken(client: httpx.Client, store: Store) -> None:
    measured(store, n1=40.0)
    answer(store, "n2")
    run = client.post("runs", json=BODY).json()["id"]
    assert names(client, run) == ["n1", "n2"]


def test_a_slow_node_is_no_spare(client: httpx.Client, store: Store) -> None:
    measured(store, n1=40.0, n2=44.0, n3=16.0)
    refused = detail(client.post("runs", json=BODY | {"nodes_max": 2, "spares": 1}))
    assert "n3 computes 2.6 times slower" in refused


def test_what_a_node_measured_is_shown_and_kept(client: httpx.Client, store: Store) -> None:
    answer(store, "n1")
    shown = client.get("nodes").json()[0]
    assert (shown["check"], shown["checked_at"]) == (None, None)
    say(store, "n1", NodeCheck(40.0, 10.0, None, 5.0))
    say(store, "n1", None)  # its agent was just started
    shown = client.get("nodes").json()[0]
    assert shown["check"] == {"compute_gflops": 40.0, "memory_gbps": 10.0, "disk_mbps": None}
    assert shown["checked_at"] == 5.0


@pytest.mark.parametrize("speed", [-1.0, float("nan"), float("inf")])
def test_no_node_computes_at_such_a_speed(store: Store, speed: float) -> None:
    with pytest.raises(StoreRefusedError, match=r"check\.compute_gflops"):
        say(store, "n1", NodeCheck(speed, 10.0, None, 5.0))


def test_a_node_is_asked_to_measure_again(client: httpx.Client, store: Store, bus_url: str) -> None:
    measured(store, n1=40.0)
    asked = client.post("nodes/n1/check", params={"why": "its fan was cleaned"})
    assert asked.status_code == 202, asked.text
    with connect(bus_url) as bus:
        assert orders(bus, "n1") == [CheckNode()]
    [row] = client.get("audit").json()["items"]
    assert (row["action"], row["target"], row["why"]) == ("node.check", "n1", "its fan was cleaned")
    say(store, "n1", None, "r7")
    assert (
        detail(client.post("nodes/n1/check")) == "ranks train on n1: measure it when r7 has ended"
    )
    assert detail(client.post("nodes/n9/check"), 404) == "no node n9"
    answer(store, "n1", left=True)
    assert "no agent with a session" in detail(client.post("nodes/n1/check"))


def test_a_factor_below_1_is_refused(client: httpx.Client, store: Store) -> None:
    measured(store, n1=40.0, n2=44.0)
    refused: dict[str, Any] = client.post("runs", json=BODY | {"join_check": 0.5}).json()
    assert refused["errors"][0]["field"] == "join_check"


def test_the_bus_is_away(store: Store) -> None:
    measured(store, n1=40.0)
    with serving(store, "redis://127.0.0.1:9") as client:
        client.headers.update(ANY)
        answered = client.post("/api/v1/nodes/n1/check")
        assert answered.status_code == 503, answered.text
