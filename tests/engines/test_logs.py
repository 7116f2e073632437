"""Logs of a run on two nodes, read from a third machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from paceline.core.errors import PacelineError
from support.machines import NEEDS_NETWORKS, SCRIPT, TOKEN, Cluster
from support.node import script
from support.waiting import until

pytestmark = NEEDS_NETWORKS
SPEAKS = """
    import json, os, runpy, sys
    rank, placement = int(os.environ["RANK"]), json.loads(os.environ["PACELINE_PLACEMENT"])
    print("rank", rank, "on", placement[rank], flush=True)
    print("a warning of rank", rank, file=sys.stderr, flush=True)
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(cluster: Cluster) -> str:
    path = script(cluster.folder, SPEAKS)
    return cluster.start_run(
        1, 2, script=path, args=[str(SCRIPT), str(cluster.shared), "1000", "2", "0.1"]
    )


@pytest.mark.long
def test_each_ranks_log_comes_from_its_node(cluster: Cluster) -> None:
    cluster.start_agents(1, 2)
    names = {cluster.network.name(node) for node in (1, 2)}
    run = start(cluster)
    cluster.reaches(run, 4, 2)
    parts = [read(cluster, f"{run}/logs/{rank}") for rank in (0, 1)]
    assert {part["node"] for part in parts} == names
    for rank, part in enumerate(parts):
        assert part["text"] == f"rank {rank} on {part['node']}\n"
        query = f"output=stderr&attempt={part['attempt']}"
        warning = read(cluster, f"{run}/logs/{rank}?{query}")
        assert f"a warning of rank {rank}\n" in warning["text"]
        assert warning["node"] == part["node"]
    out = printed(cluster, run, "--output", "stdout")
    assert out == "".join(f"[rank {rank}] {part['text']}" for rank, part in enumerate(parts))

    host = cluster.run(run)["node"]
    lost = next(node for node in (1, 2) if cluster.network.name(node) != host)
    cluster.end_agent(lost, signal.SIGKILL)
    cluster.reaches(run, 8, 1)
    alone = read(cluster, f"{run}/logs/0")
    assert (alone["node"], alone["text"]) == (host, f"rank 0 on {host}\n")
    assert alone["attempt"] > parts[0]["attempt"]
    name = cluster.network.name(lost)
    until(lambda: name in problems(cluster, run), f"{name} to be missed", 120)
    before = next(rank for rank, part in enumerate(parts) if part["node"] == name)
    with pytest.raises(PacelineError, match=name):
        cluster.api("GET", f"/runs/{run}/logs/{before}?attempt={parts[before]['attempt']}")
    (cluster.shared / "enough").touch()
    assert cluster.ends(run)["state"] == "finished"


def read(cluster: Cluster, path: str) -> dict[str, Any]:
    """What REST answers, once the nodes answer in time: the machine may be busy."""

    def answer() -> dict[str, Any] | None:
        try:
            shown: dict[str, Any] = cluster.api("GET", f"/runs/{path}")
        except PacelineError as error:
            assert "did not answer within" in str(error)
            return None
        return shown

    return until(answer, "an answer", 180) or {}


def problems(cluster: Cluster, run: str) -> set[str]:
    """The nodes whose logs are missing."""
    known = read(cluster, f"{run}/logs")["nodes"]
    return {node["node"] for node in known if node["problem"]}


def printed(cluster: Cluster, run: str, *words: str) -> str:
    """What `paceline logs` prints."""

    def done() -> subprocess.CompletedProcess[str] | None:
        ended = subprocess.run(
            [sys.executable, "-m", "paceline", "logs", run, "--server", cluster.url, *words],
            env={**os.environ, "PACELINE_TOKEN": TOKEN},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode in (0, 3), ended.stderr  # 3: a node was too busy to answer
        return None if ended.returncode else ended

    ended = until(done, "all logs", 300)
    assert ended is not None
    return ended.stdout
