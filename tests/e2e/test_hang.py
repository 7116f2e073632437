"""A rank whose loader hangs: the control plane says who waits for whom; then training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.e2e import PAUSE_S, wait_for_end
from support.node import paceline
from support.waiting import DEADLINE_S, until

pytestmark = pytest.mark.ranks

SCRIPT = """
import sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import paceline

directory = Path(sys.argv[1])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        while dist.get_rank() == 1 and not (directory / "goes-on").exists():
            (directory / "hangs").touch()
            time.sleep(0.05)
        return torch.ones(4) * index

dist.init_process_group("gloo")
session = paceline.Session(Data(), global_batch=8, seed=1)
model = session.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
loader = session.loader()
for _ in session.epochs(1):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
session.close()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_rank_without_a_batch_is_named(stack: Stack, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    body = {"script": str(script), "args": [str(tmp_path)], "nproc": 2}
    run = str(stack.api("POST", "/runs", body)["id"])

    def hang() -> dict[str, Any] | None:
        shown: dict[str, Any] = stack.api("GET", f"/runs/{run}/hang?after_s=5")
        return shown if shown["hung"] and not shown["silent"] else None

    seen = until(hang, "the hang to be told", 150, PAUSE_S)
    assert (tmp_path / "hangs").exists()
    assert (seen["waiting"], seen["holding"]) == ([0], [1])
    assert seen["words"].endswith("It waits for rank 1, which is waiting for a batch.")
    said = paceline("hang", run, "--after", "5", "--server", stack.url)
    out, err = said.communicate(timeout=DEADLINE_S)
    assert said.returncode == 4, err
    assert "It waits for rank 1" in out

    (tmp_path / "goes-on").touch()
    wait_for_end(stack, run)
    assert stack.api("GET", f"/runs/{run}/hang")["hung"] is False
