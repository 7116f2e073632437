"""A slow node of three: a verdict names it, and a spare takes its place while the run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.machines import NEEDS_NETWORKS, Cluster
from support.waiting import until

pytestmark = NEEDS_NETWORKS
SCRIPT = Path(__file__).parents[1] / "support" / "slow_script.py"
WITHIN = 100  # steps
TIMEOUT_S = 180.0


def start(cluster: Cluster, *, host: bool, **fields: Any) -> tuple[str, str, str]:
    """A run on two nodes; its id, its slow node, and its spare.

    Args:
        cluster: with three nodes.
        host: the slow node is the one that serves the rendezvous.
        fields: of the run.
    """
    cluster.start_agents(1, 2, 3)
    args = [str(cluster.shared), "1000", "4", "0"]
    run = cluster.start_run(2, 2, script=str(SCRIPT), args=args, spares=1, policy="bsp", **fields)
    [spare] = [node["id"] for node in cluster.api("GET", "/nodes") if node["spare_of"] == run]
    serves = until(lambda: cluster.run(run)["node"], "a host", TIMEOUT_S, 0.1)
    nodes = [row["node"] for row in cluster.api("GET", f"/runs/{run}/nodes")]
    slow = next(node for node in nodes if (node == serves) == host)
    (cluster.shared / f"slow-{slow}").touch()
    return run, slow, spare


def attributed(cluster: Cluster, run: str) -> dict[str, Any] | None:
    """The verdict about a run, once it names a node."""
    made: dict[str, Any] = cluster.api("GET", f"/runs/{run}/attribution")
    return made if made["node"] else None


def replacement(cluster: Cluster, run: str, state: str) -> dict[str, Any] | None:
    """The run's replacement, once it is in this state."""
    made = cluster.api("GET", f"/runs/{run}/replacements")
    return made[0] if made and made[0]["state"] == state else None


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
    cluster.assert_ends_exact(run)
    assert replacement(cluster, run, "done")["after_steps"] > 0


@pytest.mark.long
def test_the_control_plane_replaces_a_slow_node_where_it_may(cluster: Cluster) -> None:
    run, slow, spare = start(cluster, host=False, replace_slow_nodes=True)
    made = until(lambda: replacement(cluster, run, "done"), "the other node", 300, 0.2)
    assert (made["who"], made["node"], made["other"]) == ("the control plane", slow, spare)
    cluster.assert_ends_exact(run)
