"""Nodes that are measured as slow are not taken by number, only by name."""

from __future__ import annotations

import time

import httpx
import pytest

from paceline.wire import CheckNode, NodeCheck, NodeState
from paceline.wire.bus import connect
from paceline_backend.store import Store, StoreRefusedError, telemetry
from support.groups import answer, orders
from support.web import ANY, serving


def measured(store: Store, **speeds: float) -> None:
    """Nodes answer that compute at these speeds."""
    answer(store, *speeds)
    for name, speed in speeds.items():
        say(store, name, NodeCheck(speed, 10.0, None, 5.0))


def say(store: Store, name: str, check: NodeCheck | None, *runs: str) -> None:
    """A heartbeat of a node."""
    state = NodeState(name, name, 8, 2**30, [], time.time(), "0.2.0", list(runs), check=check)
    telemetry.write(store, [("", state)])


def detail(refused: httpx.Response, status: int = 409) -> str:
    assert refused.status_code == status, refused.text
    return str(refused.json()["detail"])


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


def test_the_bus_is_away(store: Store) -> None:
    measured(store, n1=40.0)
    with serving(store, "redis://127.0.0.1:9") as client:
        client.headers.update(ANY)
        answered = client.post("/api/v1/nodes/n1/check")
        assert answered.status_code == 503, answered.text
