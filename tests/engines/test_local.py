"""Runs on several nodes: three network namespaces with agents, and a control plane beside them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from typing import Any

import pytest

from support.machines import NEEDS_NETWORKS, SCRIPT, TOKEN, Cluster
from support.waiting import until

pytestmark = NEEDS_NETWORKS


@pytest.mark.long
def test_ranks_on_three_nodes_train_exactly(cluster: Cluster) -> None:
    cluster.start_agents(1, 2, 3)
    run = cluster.start_run(3, 3, 4)
    ended = cluster.ends(run)
    assert (ended["state"], ended["world"]) == ("finished", 3), ended["message"]
    cluster.assert_exact(run)
    nodes = cluster.api("GET", f"/runs/{run}/nodes")
    assert {node["state"] for node in nodes} == {"finished"}


@pytest.mark.long
def test_a_run_is_followed_from_a_terminal(cluster: Cluster) -> None:
    cluster.start_agents(1, 2)
    words = [
        "run",
        "--join-check=0",
        "--nodes",
        "2",
        "--server",
        cluster.url,
        str(SCRIPT),
        str(cluster.shared),
        "2",
        "2",
        "0",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        env={**os.environ, "PACELINE_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for said in (": running", "the run: running with 2 ranks", "the run: finished with 2 ranks"):
        assert said in done.stderr


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL]
)
def test_the_host_leaves(cluster: Cluster, number: signal.Signals) -> None:
    """The others meet elsewhere, and go on from the checkpoint."""
    cluster.start_agents(1, 2, 3)
    run = cluster.start_run(1, 3)
    cluster.reaches(run, 8, 3)
    host = cluster.run(run)["node"]
    cluster.end_agent(next(n for n in (1, 2, 3) if cluster.network.name(n) == host), number)
    until(lambda: cluster.run(run)["node"] not in (host, None), "another host", 180, 0.1)
    cluster.reaches(run, 20, 2)
    cluster.assert_ends_exact(run)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_node_leaves(cluster: Cluster, number: signal.Signals) -> None:
    cluster.start_agents(1, 2, 3)
    run = cluster.start_run(1, 3)
    cluster.reaches(run, 8, 3)
    host = cluster.run(run)["node"]
    leaves = next(node for node in (1, 2, 3) if cluster.network.name(node) != host)
    cluster.end_agent(leaves, number)
    cluster.reaches(run, 20, 2)
    cluster.assert_ends_exact(run)


@pytest.mark.long
def test_a_node_joins_and_leaves_again(cluster: Cluster) -> None:
    """Over REST."""
    cluster.start_agents(1, 2)
    run = cluster.start_run(1, 3)
    cluster.reaches(run, 8, 2)
    cluster.start_agents(3)
    cluster.api("POST", f"/runs/{run}/nodes", {"nodes": 1})
    cluster.reaches(run, 20, 3)
    cluster.api("DELETE", f"/runs/{run}/nodes/{cluster.network.name(3)}")
    cluster.reaches(run, 24, 2)
    cluster.assert_ends_exact(run)


@pytest.mark.long
def test_a_policy_switch_takes_effect_at_one_step_on_all_nodes(cluster: Cluster) -> None:
    cluster.start_agents(1, 2, 3)
    run = cluster.start_run(3, 3)
    cluster.reaches(run, 8, 3)
    cluster.api("POST", f"/runs/{run}/policy", {"policy": "paceline", "by": "the test"})

    def effective() -> int | None:
        switches = cluster.api("GET", f"/runs/{run}/switches")
        return switches[1]["effective_step"]  # type: ignore[no-any-return]

    step = until(effective, "the switch to take effect", 180, 0.1)
    cluster.reaches(run, step + 4, 3)
    cluster.assert_ends_exact(run)
    segments = cluster.api("GET", f"/runs/{run}/segments?limit=1000")
    first = min(segment["seq"] for segment in segments if segment["version"] == 1)
    query = "SELECT rank, min(step) FROM worker_steps WHERE segment >= ? GROUP BY rank"
    with contextlib.closing(sqlite3.connect(cluster.folder / "server" / "paceline.db")) as known:
        by_rank = dict(known.execute(query, (first,)))
    assert by_rank == dict.fromkeys(range(3), step)


@pytest.mark.long
@pytest.mark.parametrize("cut", ["the host", "another"])
def test_a_node_loses_its_way_to_the_bus(cluster: Cluster, cut: str) -> None:
    """Its ranks train on with the others, and their telemetry comes later."""
    cluster.start_agents(1, 2, 3)
    run = cluster.start_run(3, 3)
    cluster.reaches(run, 8, 3)
    host = cluster.run(run)["node"]
    names = {node: cluster.network.name(node) for node in (1, 2, 3)}
    node = next(node for node in names if (names[node] == host) == (cut == "the host"))

    def shown() -> dict[str, Any]:
        rows = cluster.api("GET", f"/runs/{run}/nodes")
        return next(row for row in rows if row["node"] == names[node])

    before = cluster.newest_step()
    cluster.network.cut_off(node)
    ends_at = time.monotonic() + 20.0
    until(lambda: not shown()["alive"], "the node to be shown as not answering", 180, 0.1)
    until(lambda: time.monotonic() > ends_at, "20 s without the bus", 60, 0.5)
    assert (shown()["alive"], shown()["state"], shown()["message"]) == (False, "running", None)
    assert cluster.newest_step() > before, "training went on"
    cluster.network.let_back(node)
    until(lambda: shown()["alive"], "the node to answer again", 180, 0.1)
    cluster.reaches(run, cluster.newest_step() + 1, 3)
    assert cluster.run(run)["attempt"] == 0, "the ranks never met anew"
    cluster.assert_ends_exact(run)
    cluster.assert_complete(run)


@pytest.mark.long
def test_the_control_plane_is_killed_while_a_node_joins(cluster: Cluster) -> None:
    """Training goes on meanwhile; the node has joined once the control plane is back."""
    cluster.start_agents(1, 2)
    run = cluster.start_run(1, 3)
    cluster.reaches(run, 8, 2)
    cluster.start_agents(3)
    cluster.api("POST", f"/runs/{run}/nodes", {"nodes": [cluster.network.name(3)]})
    cluster.kill_server()
    killed_at = cluster.newest_step()
    until(lambda: cluster.newest_step() > killed_at + 4, "training to go on", 180, 0.1)
    cluster.start_server()
    cluster.reaches(run, killed_at + 8, 3)
    cluster.assert_ends_exact(run)
    cluster.assert_complete(run)


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_twenty_nodes_are_lost_in_one_run(cluster: Cluster) -> None:
    """No sample of an epoch is used twice or left out, whoever is lost and when."""
    rng = random.Random(7)
    cluster.start_agents(1, 2, 3)
    run = cluster.start_run(1, 3, policy="paceline")
    cluster.reaches(run, 4, 3)
    for number in range(20):
        node = rng.choice((1, 2, 3))
        name = cluster.network.name(node)
        step = cluster.run(run)["step"] + rng.randrange(1, 12)
        cluster.reaches(run, step, 3)
        cluster.end_agent(node, rng.choice((signal.SIGKILL, signal.SIGTERM)))
        cluster.reaches(run, step + 1, 2)
        cluster.start_agents(node)
        until(lambda name=name: cluster.joins(run, name), f"{name} to join again", 180, 0.5)
        cluster.reaches(run, step + 2, 3)
        assert cluster.run(run)["attempt"] > number
    cluster.assert_ends_exact(run)
