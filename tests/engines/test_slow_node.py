"""A slow node of three: a verdict names it, and a spare takes its place while the run trains."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.machines import Cluster
from support.network import network
from support.waiting import until

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and ip"
    ),
]
SCRIPT = Path(__file__).parents[1] / "support" / "slow_script.py"
WITHIN = 100  # steps
TIMEOUT_S = 180.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with network(3) as nodes, Cluster(nodes, tmp_path) as made:
        made.start_agents(1, 2, 3)
        yield made


def start(cluster: Cluster, *, host: bool, **fields: Any) -> tuple[str, str, str]:
    """A run on two nodes; its id, its slow node, and its spare.

    Args:
        cluster: with three nodes.
        host: the slow node is the one that serves the rendezvous.
        fields: of the run.
    """
    shared = cluster.folder / "shared"
    shared.mkdir()
    body = {
        "script": str(SCRIPT),
        "args": [str(shared), "1000", "4", "0"],
        "nproc": 1,
        "nodes_min": 2,
        "nodes_max": 2,
        "join_check": 0,
        "spares": 1,
        "policy": "bsp",
        **fields,
    }
    run = str(cluster.api("POST", "/runs", body)["id"])
    [spare] = [node["id"] for node in cluster.api("GET", "/nodes") if node["spare_of"] == run]
    serves = until(lambda: cluster.run(run)["node"], "a host", TIMEOUT_S, 0.1)
    nodes = [row["node"] for row in cluster.api("GET", f"/runs/{run}/nodes")]
    slow = next(node for node in nodes if (node == serves) == host)
    (shared / f"slow-{slow}").touch()
    return run, slow, spare


def attributed(cluster: Cluster, run: str) -> dict[str, Any] | None:
    """The verdict about a run, once it names a node."""
    made: dict[str, Any] = cluster.api("GET", f"/runs/{run}/attribution")
    return made if made["node"] else None


def replacement(cluster: Cluster, run: str, state: str) -> dict[str, Any] | None:
    """The run's replacement, once it is in this state."""
    made = cluster.api("GET", f"/runs/{run}/replacements")
    return made[0] if made and made[0]["state"] == state else None


def assert_ends_exact(cluster: Cluster, run: str) -> None:
    (cluster.folder / "shared" / "enough").touch()
    ended = cluster.ends(run)
    assert ended["state"] == "finished", ended["message"]
    covered = cluster.api("GET", f"/runs/{run}/coverage")
    assert covered["epochs"]
    assert all(epoch["exact"] for epoch in covered["epochs"]), covered


@pytest.mark.long
@pytest.mark.parametrize("host", [False, True])
def test_a_slow_node_is_named_and_replaced(cluster: Cluster, host: bool) -> None:
    run, slow, spare = start(cluster, host=host)
    cluster.reaches(run, 12, 2)
    verdict = until(lambda: attributed(cluster, run), "a node that is named", TIMEOUT_S, 0.2)
    assert (verdict["node"], verdict["cause"]) == (slow, "node")
    assert verdict["to"] < WITHIN
    assert verdict["words"].startswith(f"{slow} computes at ")
    [rank] = verdict["ranks"]
    assert verdict["workers"][rank]["on_node"] == slow

    def saving() -> Any:
        return cluster.api("GET", f"/runs/{run}/attribution")["saving"]

    assert until(saving, "a forecast", TIMEOUT_S, 0.2)["saving_low"] > 0
    body = {"cordon": True, "why": "it is slow"}
    cluster.api("POST", f"/runs/{run}/nodes/{slow}/replace", body)
    made = until(lambda: replacement(cluster, run, "done"), "the other node", TIMEOUT_S, 0.2)
    assert (made["node"], made["other"], made["why"]) == (slow, spare, "it is slow")
    assert made["forecast_s"] < made["before_s"]
    attempts = cluster.api("GET", f"/runs/{run}/attempts")
    assert len(attempts) == 2, "the ranks met more than once"
    cluster.reaches(run, made["first_step"] + 30, 2)
    # Not another one, either, unless the tests beside this one slow its core.
    assert cluster.api("GET", f"/runs/{run}/attribution")["node"] != slow
    shown = {node["id"]: node for node in cluster.api("GET", "/nodes")}
    assert shown[slow]["cordoned"]["reason"] == "it is slow"
    assert shown[spare]["spare_of"] is None
    history = cluster.api("GET", f"/nodes/{slow}/history")
    assert [row["run"] for row in history["slow"]] == [run]
    assert_ends_exact(cluster, run)
    assert replacement(cluster, run, "done")["after_steps"] > 0


@pytest.mark.long
def test_the_control_plane_replaces_a_slow_node_where_it_may(cluster: Cluster) -> None:
    run, slow, spare = start(cluster, host=False, replace_slow_nodes=True)
    made = until(lambda: replacement(cluster, run, "done"), "the other node", 300, 0.2)
    assert (made["who"], made["node"], made["other"]) == ("the control plane", slow, spare)
    assert_ends_exact(cluster, run)
