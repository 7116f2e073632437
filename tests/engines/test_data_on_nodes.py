"""Data that lives on nodes: three nodes with a directory each, and a source over HTTP."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import sharded_script
from support.machines import NEEDS_NETWORKS, Cluster
from support.waiting import until

pytestmark = NEEDS_NETWORKS
TOTAL = int(sharded_script.LENGTHS.sum())


class Source:
    """The data's server on the head, which all nodes reach."""

    def __init__(self, port: int, cluster: Cluster) -> None:
        self._place = f"http://{cluster.network.head}:{port}"
        self.url = f"{self._place}/data.bin"

    def reads(self, address: str) -> int:
        """Ranges that a node has read so far."""
        with urllib.request.urlopen(f"{self._place}/readers", timeout=30) as answer:
            return int(json.loads(answer.read()).get(address, 0))


@pytest.fixture
def source(cluster: Cluster, tmp_path: Path) -> Iterator[Source]:
    file = tmp_path / "data.bin"
    file.write_bytes(b"".join(map(sharded_script.content, range(sharded_script.SAMPLES))))
    script = Path(__file__).parents[1] / "support" / "http_files.py"
    with subprocess.Popen(
        [sys.executable, str(script), str(file), cluster.network.head],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield Source(int(process.stdout.readline()), cluster)
        process.kill()


def start(cluster: Cluster, source: Source, epochs: int, bandwidth: float, slow: int) -> str:
    """Starts a run under `chronica` on three nodes, of which each can keep half of the data."""
    words = [str(cluster.shared), epochs, source.url, TOTAL // 2, bandwidth, slow]
    return cluster.start_run(
        1,
        3,
        script=str(Path(sharded_script.__file__)),
        args=[str(word) for word in words],
        policy="chronica",
    )


def moved_rows(cluster: Cluster, run: str) -> list[dict[str, Any]]:
    """What moved for each epoch and node."""
    rows: list[dict[str, Any]] = cluster.api("GET", f"/runs/{run}/data")
    for row in rows:
        print(json.dumps(row))
    return rows


@pytest.mark.long
def test_no_step_waits_for_data_after_the_first_epoch(cluster: Cluster, source: Source) -> None:
    cluster.start_agents(1, 2, 3)
    run = start(cluster, source, 5, 2e6, slow=2)
    ended = cluster.ends(run)
    assert ended["state"] == "finished", ended["message"]
    cluster.assert_exact(run)
    rows = moved_rows(cluster, run)
    assert len(rows) == 5 * 3
    later = [row for row in rows if row["epoch"]]
    planned, moved = (sum(row[name] for row in later) for name in ("planned_bytes", "moved_bytes"))
    assert planned > TOTAL // 20, "rank 0 gives samples up when it slows down"
    assert abs(moved - planned) <= 0.05 * planned
    assert [row["waits"] for row in later] == [0] * len(later)
    assert [row["read_bytes"] for row in later] == [0] * len(later)
    assert all(row["held_bytes"] <= TOTAL // 2 for row in rows)
    replayed = subprocess.run(
        [sys.executable, "-m", "paceline", "replay", run, "--data", cluster.folder / "server"],
        capture_output=True,
        text=True,
        check=False,
    )
    kept = f"The run is in {cluster.folder / 'server' / 'paceline.db'}"
    assert replayed.returncode == 0, f"{replayed.stdout}{replayed.stderr}{kept}"


@pytest.mark.long
def test_a_node_that_is_lost_while_data_moves_to_it(cluster: Cluster, source: Source) -> None:
    cluster.start_agents(1, 2, 3)
    run = start(cluster, source, 1000, 2e4, slow=2)
    network = cluster.network
    steps = -(-sharded_script.SAMPLES // sharded_script.BATCH)
    cluster.reaches(run, steps + 2, 3)  # past the first epoch, in which all is read
    host = cluster.run(run)["node"]
    others = [node for node in (1, 2, 3) if network.name(node) != host]
    before = {node: source.reads(network.address(node)) for node in others}

    def receiving() -> int | None:
        return next((n for n in others if source.reads(network.address(n)) > before[n] + 1), None)

    lost = until(receiving, "a node to which data moves", 300, 0.05)
    assert lost is not None
    cluster.end_agent(lost, signal.SIGKILL)
    step = int(cluster.run(run)["step"])
    cluster.reaches(run, step + 2 * steps, 2)
    cluster.assert_ends_exact(run)
    assert {row["node"] for row in moved_rows(cluster, run)} == {network.name(n) for n in (1, 2, 3)}
