"""A run whose rank hangs starts again by itself, as often as it may; then it has failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.e2e import PAUSE_S, wait_for_end
from support.node import paceline
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1500)]

SCRIPT = """
import os, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
import paceline

directory, attempts = Path(sys.argv[1]), int(sys.argv[2])

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        late = session.step >= 3 and dist.get_rank() == 1
        if late and int(os.environ["PACELINE_ATTEMPT"]) < attempts:
            threading.Event().wait()
        return torch.ones(4) * index

dist.init_process_group("gloo")
session = paceline.Session(Data(), global_batch=8, seed=1, coast_steps=1)
model = session.wrap(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), 1e-6)
loader = session.loader()
session.checkpoint(directory / "checkpoints", model, optimizer, every_steps=1)
print("begins after step", session.step, flush=True)
for _ in session.epochs(1):
    for x in loader:
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
session.close()
dist.destroy_process_group()
"""


def start(stack: Stack, folder: Path, hangs: int, restarts: int) -> str:
    """A run of which rank 1 hangs in its first attempts."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    body = {"script": str(script), "args": [str(folder), str(hangs)], "nproc": 2}
    options = {"max_restarts": restarts, "restart_hung_s": 30}
    return str(stack.api("POST", "/runs", body | options)["id"])


def restarts(stack: Stack, run: str) -> list[dict[str, Any]]:
    """What the audit log has of the control plane's restarts, oldest first."""
    items = stack.api("GET", f"/audit?run={run}")["items"]
    return [each for each in reversed(items) if each["action"] == "run.restart-hung"]


def test_a_run_that_hangs_starts_again(stack: Stack, tmp_path: Path) -> None:
    run = start(stack, tmp_path, 1, 1)
    shown = wait_for_end(stack, run)
    assert shown["attempt"] == 1
    [restarted] = restarts(stack, run)
    assert restarted["who"] == "the control plane"
    assert restarted["details"] == {"attempt": 0, "ranks": [1]}
    assert "It waits for rank 1, which is waiting for a batch." in restarted["why"]
    # It went on from its newest checkpoint.
    said = paceline("logs", run, "--rank", "0", "--output", "stdout", "--server", stack.url)
    out, err = said.communicate(timeout=DEADLINE_S)
    assert said.returncode == 0, err
    assert "begins after step -1" not in out
    # Where the rank was stays in its log.
    said = paceline("logs", run, *("--rank", "1", "--attempt", "0"), "--server", stack.url)
    out, err = said.communicate(timeout=DEADLINE_S)
    assert said.returncode == 0, err
    assert "paceline ends this rank because the run hangs: No step has ended" in out
    assert "in __getitem__" in out


@pytest.mark.long
def test_a_run_that_hangs_too_often_fails(stack: Stack, tmp_path: Path) -> None:
    run = start(stack, tmp_path, 9, 1)

    def failed() -> dict[str, Any] | None:
        shown: dict[str, Any] = stack.api("GET", f"/runs/{run}")
        assert shown["state"] != "finished"
        return shown if shown["state"] == "failed" else None

    message = until(failed, "the run to fail", 2 * TRAINING_S, PAUSE_S)["message"]
    first = message.partition("\n")[0]
    assert first.startswith("rank 1 was killed by SIGKILL, because the run hung: No step has ended")
    assert "It waits for rank 1, which is waiting for a batch." in first
    assert "in __getitem__" in message
    assert [each["details"]["attempt"] for each in restarts(stack, run)] == [0, 1]
