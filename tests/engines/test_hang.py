"""A rank that hangs on the second of two nodes: its stacks, and a restart of the run on both."""

from __future__ import annotations

from typing import Any

import pytest

from support.machines import NEEDS_NETWORKS, Cluster
from support.waiting import TRAINING_S, until

pytestmark = NEEDS_NETWORKS

SCRIPT = """
import os, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import paceline

directory = Path(sys.argv[1])

def hang():
    (directory / "hangs").touch()
    while not (directory / "goes-on").exists():
        threading.Event().wait(0.2)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        late = session.step >= 3 and dist.get_rank() == 1
        if late and os.environ["PACELINE_ATTEMPT"] == "0":
            hang()
        return torch.ones(4) * index

dist.init_process_group("gloo")
session = paceline.Session(Data(), global_batch=8, seed=1, coast_steps=1)
model = session.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
loader = session.loader()
session.checkpoint(directory / "checkpoints", model, optimizer, every_steps=1)
for _ in session.epochs(1):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
session.close()
dist.destroy_process_group()
"""


def start(cluster: Cluster, **fields: Any) -> str:
    """A run with a rank on each of two nodes, of which the second one hangs."""
    cluster.start_agents(1, 2)
    script = cluster.shared / "train.py"
    script.write_text(SCRIPT)
    given = {"script": str(script), "args": [str(cluster.shared)], **fields}
    run = cluster.start_run(2, 2, **given)
    until((cluster.shared / "hangs").exists, "a rank to hang", TRAINING_S)
    return run


@pytest.mark.long
def test_stacks_come_from_both_nodes(cluster: Cluster) -> None:
    run = start(cluster)

    def frames() -> list[str] | None:
        stacks = cluster.api("GET", f"/runs/{run}/stacks")["stacks"]
        assert len({stack["node"] for stack in stacks}) == 2
        shown = [stack["frame"] for stack in stacks]
        return shown if shown[1].endswith("in hang") and "<module>" in shown[0] else None

    assert until(frames, "both ranks to wait", TRAINING_S, 0.2)
    (cluster.shared / "goes-on").touch()
    ended = cluster.ends(run)
    assert (ended["state"], ended["attempt"]) == ("finished", 0), ended["message"]


@pytest.mark.long
def test_a_run_that_hangs_starts_again_on_both_nodes(cluster: Cluster) -> None:
    run = start(cluster, restart_hung_s=10, max_restarts=1)
    ended = cluster.ends(run)
    assert (ended["state"], ended["world"]) == ("finished", 2), ended["message"]
    assert ended["attempt"] == 1
    [restarted] = [
        each
        for each in cluster.api("GET", f"/audit?run={run}")["items"]
        if each["action"] == "run.restart-hung"
    ]
    assert restarted["details"] == {"attempt": 0, "ranks": [1]}
    covered = cluster.api("GET", f"/runs/{run}/coverage")
    assert covered["exact"], covered
