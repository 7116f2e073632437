"""What engines have to do, over the nodes of `local`, as far as it applies.

| case of `EngineContract` | here |
|---|---|
| trains exactly on two nodes | `test_local.test_ranks_on_three_nodes_train_exactly` |
| waits, is stopped or cancelled while it waits | no queue: 409, in `integration/requests` |
| is stopped while it trains | `test_a_run_is_stopped_on_all_its_nodes` |
| nobody submits it twice | `integration/node/test_agent.py`: an agent obeys no launch twice |
| the control plane is killed | `test_the_control_plane_is_killed_and_comes_back` |
| a node is lost and another joins | `test_local.test_twenty_nodes_are_lost_in_one_run` |
| grows and shrinks | `test_local.test_a_node_joins_and_leaves_again` |
| its job is lost, and it goes on | `test_local.test_the_host_leaves` |
| a cordoned node gets nothing | `test_a_cordoned_node_gets_nothing_until_that_is_lifted` |
| a node is replaced | `test_slow_node.test_a_slow_node_is_named_and_replaced` |
"""

from __future__ import annotations

import pytest

from paceline.core.errors import InputError
from paceline_backend.testing.engines import kill_server
from support.machines import NEEDS_NETWORKS, Cluster
from support.waiting import until

pytestmark = [*NEEDS_NETWORKS, pytest.mark.long]


def test_a_run_is_stopped_on_all_its_nodes(cluster: Cluster) -> None:
    cluster.start_agents(1, 2)
    run = cluster.start_run(2, 2)
    cluster.reaches(run, 4, 2)
    cluster.api("POST", f"/runs/{run}/stop", {"force": True})
    assert cluster.ends(run)["state"] == "stopped"
    rows = cluster.api("GET", f"/runs/{run}/nodes")
    assert [row["state"] for row in rows] == ["stopped", "stopped"]

    def idle() -> bool:
        return not any(node["runs"] for node in cluster.api("GET", "/nodes"))

    until(idle, "idle nodes", 180, 0.1)


def test_the_control_plane_is_killed_and_comes_back(cluster: Cluster) -> None:
    """Training goes on meanwhile, and nothing of it is lost."""
    cluster.start_agents(1, 2)
    run = cluster.start_run(2, 2)
    cluster.reaches(run, 8, 2)
    kill_server(cluster)
    cluster.start_server()
    cluster.reaches(run, cluster.run(run)["step"] + 12, 2)
    assert cluster.run(run)["attempt"] == 0
    cluster.assert_ends_exact(run)


def test_a_cordoned_node_gets_nothing_until_that_is_lifted(cluster: Cluster) -> None:
    cluster.start_agents(1, 2)
    name = cluster.network.name(2)
    shown = cluster.api("PUT", f"/nodes/{name}/cordon", {"reason": "its disk is slow"})
    assert shown["in_engine"] is None
    run = cluster.start_run(1, 2)
    cluster.reaches(run, 4, 1)
    with pytest.raises(InputError, match="its disk is slow"):
        cluster.api("POST", f"/runs/{run}/nodes", {"nodes": [name]})
    cluster.api("DELETE", f"/nodes/{name}/cordon")
    cluster.api("POST", f"/runs/{run}/nodes", {"nodes": [name]})
    cluster.reaches(run, cluster.run(run)["step"] + 4, 2)
    cluster.assert_ends_exact(run)
