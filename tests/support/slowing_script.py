"""A training whose rank 1 becomes three times as slow when a file appears.

python slowing_script.py DIRECTORY: each rank takes a time in proportion to its load. Rank 1 writes
each step that it has made to DIRECTORY/step, and the first slow one to DIRECTORY/slow-since, once
DIRECTORY/slow exists.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

SAMPLES, BATCH, SECONDS_PER_UNIT = 3_200, 32, 0.0002


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.sizes = np.random.default_rng(0).lognormal(3, 0.8, SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), index / SAMPLES), torch.tensor(index % 7.0)


def train(directory: Path) -> None:
    session = paceline.Session(Data(), global_batch=BATCH, seed=2)
    model = session.wrap(nn.Linear(4, 1))
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), 0.01))
    loader = session.loader()
    slow = False
    for _ in session.epochs(10_000):
        for x, y in loader:
            batch = session.batch
            if session.rank == 1:
                if not slow and (directory / "slow").exists():
                    slow = True
                    (directory / "slow-since").write_text(str(batch.step))
                (directory / "step").write_text(str(batch.step))
            time.sleep(SECONDS_PER_UNIT * batch.load * (3 if slow else 1))
            loss = mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
