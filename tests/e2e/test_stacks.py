"""Stacks of real ranks: of those that hang in Python and in C, and of those that have none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.server.stack import Stack
from support.e2e import PAUSE_S, wait_for_end
from support.node import paceline
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1200)]

SCRIPT = """
import sys, threading
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
        if dist.get_rank() == 1:
            hang()
        return torch.ones(4) * index

dist.init_process_group("gloo")
session = paceline.Session(Data(), global_batch=8, seed=1, prove=False)
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


def start(stack: Stack, folder: Path, text: str) -> str:
    """A run of two ranks that has come to where it hangs."""
    script = folder / "train.py"
    script.write_text(text)
    body = {"script": str(script), "args": [str(folder)], "nproc": 2}
    run = str(stack.api("POST", "/runs", body)["id"])
    until((folder / "hangs").exists, "a rank to hang", TRAINING_S)
    return run


def all_with(
    stack: Stack, run: str, condition: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Stacks of both ranks, once each meets a condition."""

    def asked() -> list[dict[str, Any]] | None:
        stacks: list[dict[str, Any]] = stack.api("GET", f"/runs/{run}/stacks")["stacks"]
        return stacks if len(stacks) == 2 and all(map(condition, stacks)) else None

    return until(asked, "the stacks of both ranks", pause_s=PAUSE_S)


def test_ranks_that_hang_tell_where(stack: Stack, tmp_path: Path) -> None:
    run = start(stack, tmp_path, SCRIPT)
    first = all_with(stack, run, lambda each: "backward" in each["text"] or "hang" in each["text"])
    reducing, waiting = first
    assert (reducing["rank"], waiting["rank"]) == (0, 1)
    # Rank 0 is in C, below `backward`, where the gradients are all-reduced.
    line = 1 + SCRIPT.splitlines().index("        model(x).mean().backward()")
    assert reducing["frame"] == f"train.py:{line} in <module>"
    line = 1 + SCRIPT.splitlines().index("        threading.Event().wait(0.2)")
    assert waiting["frame"] == f"train.py:{line} in hang"
    assert "in __getitem__" in waiting["text"]
    alone = stack.api("GET", f"/runs/{run}/stacks?rank=1")["stacks"]
    assert [each["rank"] for each in alone] == [1]
    # Each time it is asked, a rank tells its stacks of then only.
    assert alone[0]["text"].count("Current thread") == 1

    said = paceline("stacks", run, "--rank", "1", "--server", stack.url)
    out, err = said.communicate(timeout=DEADLINE_S)
    assert said.returncode == 0, err
    assert out.splitlines()[0].endswith(f": train.py:{line} in hang")
    until(lambda: stack.api("GET", f"/runs/{run}/hang?after_s=5")["hung"], "the hang", TRAINING_S)
    said = paceline("hang", run, "--after", "5", "--stacks", "--server", stack.url)
    out, err = said.communicate(timeout=DEADLINE_S)
    assert said.returncode == 4, err
    assert out.endswith(f" Rank 1 is at train.py:{line} in hang.\n")

    (tmp_path / "goes-on").touch()
    wait_for_end(stack, run)  # no rank was harmed
    said = paceline("stacks", run, "--server", stack.url)
    _, err = said.communicate(timeout=DEADLINE_S)
    assert (said.returncode, "has ended" in err) == (2, True)
