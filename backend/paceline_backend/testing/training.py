"""Training script for the contract of engines. It resumes from checkpoints.

    python training.py DIRECTORY EPOCHS EVERY SECONDS

It writes a checkpoint to DIRECTORY/checkpoints every EVERY steps. A step takes SECONDS longer than
its computation. The training ends after EPOCHS epochs, or with the epoch in which the file
DIRECTORY/enough appears.
"""

from __future__ import annotations

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
    """A data set of random vectors, and of targets that a small network can learn from them."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))
        self.y = self.x.sin().sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def main() -> None:
    """Train for the number of epochs on the command line, or until the file ``enough`` exists."""
    directory, epochs, every, seconds = Path(sys.argv[1]), *map(float, sys.argv[2:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    data = Data()
    session = paceline.Session(data, global_batch=BATCH, seed=4)
    model = session.wrap(nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    loader = session.loader()
    session.checkpoint(str(directory / "checkpoints"), model, optimizer, every_steps=int(every))
    for _ in session.epochs(int(epochs)):
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            time.sleep(seconds)
        enough = [(directory / "enough").exists()]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
