"""How ranks find rank 0's store: also between nodes, where host names say nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.train import startup
from support.waiting import DEADLINE_S

NODES = 2
PORT = 29500  # in network namespaces of the test's own

SCRIPT = """
import torch.distributed as dist
from datetime import timedelta
from paceline import Session
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
session = Session(range(8), global_batch=4)
taken = [len(batch) for batch in session.loader()]
print("rank", session.rank, "of", session.world, "took", taken)
session.close()
dist.destroy_process_group()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Two network namespaces joined by a cable, as two nodes: 10.77.8.1 and 10.77.8.2."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and iproute2")
    names = [f"pl{os.getpid()}-{node}" for node in range(NODES)]
    with ExitStack() as made:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
            made.callback(ip, "netns", "delete", name)
        first, second = names
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "eth0", "netns", second)
        for node, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"10.77.8.{node}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


@pytest.mark.ranks
def test_nodes_with_the_same_host_name_meet(namespaces: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    world = {"WORLD_SIZE": f"{NODES}", "MASTER_ADDR": "10.77.8.1", "MASTER_PORT": f"{PORT}"}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "train.py"],
            cwd=tmp_path,
            env=os.environ | world | {"RANK": f"{rank}", "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, name in enumerate(namespaces)
    ]
    try:
        ended = [rank.communicate(timeout=DEADLINE_S) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = [(process.returncode, out) for process, (out, _) in zip(ranks, ended, strict=True)]
    assert said == [(0, f"rank {rank} of 2 took [2, 2]\n") for rank in range(NODES)], ended


def test_ranks_of_one_network_namespace_are_at_the_same_place() -> None:
    code = "from paceline.train.startup import place; print(place())"
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == startup.place()
