"""A training script for several nodes that goes on from checkpoints.

python several_script.py DIRECTORY EPOCHS EVERY SECONDS: checkpoints in DIRECTORY/checkpoints, each
EVERY steps; a step takes SECONDS more than its work. It ends with the epoch in which
DIRECTORY/enough appears, where that comes first. Each rank writes a line of JSON for each step to
DIRECTORY/steps-NODE-RANK: [attempt, step, world]; and at its start its placement.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

SAMPLES, BATCH = 96, 12


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def main() -> None:
    directory, epochs, every, seconds = Path(sys.argv[1]), *map(float, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    attempt = int(os.environ["PACELINE_ATTEMPT"])
    placement = json.loads(os.environ["PACELINE_PLACEMENT"])
    data = Data()
    session = paceline.Session(data, global_batch=BATCH, seed=4)
    model = session.wrap(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = session.loader()
    session.checkpoint(str(directory / "checkpoints"), model, optimizer, every_steps=int(every))
    path = directory / f"steps-{placement[session.rank]}-{session.rank}"
    with path.open("a", buffering=1) as file:
        file.write(json.dumps({"attempt": attempt, "placement": placement}) + "\n")
        for _ in session.epochs(int(epochs)):
            for x, y in loader:
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
                time.sleep(seconds)
                file.write(json.dumps([attempt, session.step, session.world]) + "\n")
            enough = [(directory / "enough").exists()]
            dist.broadcast_object_list(enough)
            if enough[0]:
                break
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
