"""Runs on several nodes whose networks and names are not as they should be."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline_backend.server.embedded import EmbeddedBus
from support.machines import NEEDS_NETWORKS, Cluster
from support.network import network
from support.postgres import Postgres
from support.waiting import until

pytestmark = NEEDS_NETWORKS


@pytest.mark.long
def test_a_pulled_cable(cluster: Cluster) -> None:
    """Nobody closes a connection: the others notice it by themselves."""
    cluster.start_agents(1, 2, 3)
    run = cluster.start_run(1, 3)
    cluster.reaches(run, 8, 3)
    host = cluster.run(run)["node"]
    pulled = next(node for node in (1, 2, 3) if cluster.network.name(node) != host)
    cluster.network.pull(pulled)
    cluster.reaches(run, 20, 2)
    rows = {row["node"]: row for row in cluster.api("GET", f"/runs/{run}/nodes")}
    assert "its agent has not answered since" in rows[cluster.network.name(pulled)]["message"]
    cluster.assert_ends_exact(run)


@pytest.mark.long
def test_host_names_do_not_matter(cluster: Cluster) -> None:
    """Two nodes have the same name, and on each it means the node's loopback."""
    for node in (1, 2):
        cluster.network.name_loopback(node, "twin")
    cluster.start_agents(1, 2, host="twin")
    run = cluster.start_run(2, 2, 2)
    ended = cluster.ends(run)
    assert (ended["state"], ended["world"]) == ("finished", 2), ended["message"]
    cluster.assert_exact(run)
    assert {node["hostname"] for node in cluster.api("GET", "/nodes")} == {"twin"}


def test_an_interface_that_is_not_there_is_told(cluster: Cluster) -> None:
    cluster.start_agents(1)
    cluster.start_agents(2, env={"GLOO_SOCKET_IFNAME": "wan7"})
    ended = cluster.ends(cluster.start_run(2, 2))
    assert ended["state"] == "failed"
    name = cluster.network.name(2)
    problem = "GLOO_SOCKET_IFNAME is 'wan7', but this node's interfaces are"
    assert ended["message"].startswith(f"{name}: {problem}"), ended["message"]


@pytest.mark.long
@pytest.mark.parametrize("alone", [False, True])
def test_an_agent_beside_the_server_takes_part(tmp_path: Path, alone: bool) -> None:
    """It reaches the server over loopback, where no other node could meet it."""
    with network(2) as nodes, Cluster(nodes, tmp_path, "0.0.0.0") as cluster:
        head = cluster.start_agent_on_head()
        if alone:
            run = cluster.start_run(1, 2)
            cluster.reaches(run, 2, 1)
            cluster.start_agents(1)
            cluster.api("POST", f"/runs/{run}/nodes", {"nodes": 1})
            name, start = nodes.name(1), f"{nodes.name(1)} cannot reach the rendezvous on head"

            def refused() -> bool:
                rows = {row["node"]: row for row in cluster.api("GET", f"/runs/{run}/nodes")}
                return str(rows[name]["message"]).startswith(start)

            until(refused, "the reason to be told", 180, 0.1)
            cluster.assert_ends_exact(run)
        else:
            cluster.start_agents(1, 2)
            run = cluster.start_run(3, 3, 2)
            ended = cluster.ends(run)
            assert (ended["state"], ended["world"]) == ("finished", 3), ended["message"]
            assert ended["node"] != head
            cluster.assert_exact(run)


@pytest.mark.long
def test_a_redis_and_a_postgres_of_ones_own(tmp_path: Path) -> None:
    with network(2) as nodes, EmbeddedBus(tmp_path / "bus", host=nodes.head) as bus:
        postgres = Postgres()
        try:
            postgres.start()
            url = bus.url.replace("127.0.0.1", nodes.head)
            more = ("--bus", url, "--database", postgres.database())
            with Cluster(nodes, tmp_path, "", *more) as cluster:
                cluster.start_agents(1, 2)
                run = cluster.start_run(2, 2, 2)
                ended = cluster.ends(run)
                assert (ended["state"], ended["world"]) == ("finished", 2), ended["message"]
                cluster.assert_exact(run)
        finally:
            postgres.stop()
