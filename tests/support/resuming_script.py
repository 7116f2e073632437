"""A training script that kills all its ranks in given steps, and goes on from checkpoints.

python resuming_script.py DIRECTORY EPOCHS EVERY KILLS: KILLS is JSON, for each attempt the step in
which all ranks end by SIGKILL. Each rank writes a line of JSON for each finished step to
DIRECTORY/steps-RANK, [attempt, step], and rank 0 the loss of all samples to DIRECTORY/loss.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

SAMPLES, BATCH = 50, 8


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def train(directory: Path, epochs: int, every: int, kill: int | None, attempt: int) -> None:
    torch.manual_seed(3)
    data = Data()
    session = paceline.Session(data, global_batch=BATCH, seed=4)
    network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    model = session.wrap(network)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = session.loader()
    checkpoints = os.environ["PACELINE_CHECKPOINTS"]
    session.checkpoint(checkpoints, model, optimizer, every_steps=every)
    with (directory / f"steps-{session.rank}").open("a", buffering=1) as file:
        for _ in session.epochs(epochs):
            for x, y in loader:
                if session.step == kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
                file.write(json.dumps([attempt, session.step]) + "\n")
    if session.rank == 0:
        with torch.no_grad():
            (directory / "loss").write_text(repr(mse_loss(network(data.x), data.y).item()))
    session.close()


def main() -> None:
    directory, epochs, every, kills = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    attempt = int(os.environ["PACELINE_FIRST_ATTEMPT"])
    attempt += int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dies = dict(enumerate(json.loads(kills)))
    train(Path(directory), int(epochs), int(every), dies.get(attempt), attempt)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
