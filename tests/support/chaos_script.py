"""The training that faults disturb: small, with a checkpoint every few steps.

python chaos_script.py DIRECTORY EPOCHS: each rank appends a line of JSON for each step that it has
made to DIRECTORY/steps-RANK, [process, epoch, step, samples], and at the end writes its parameters
to DIRECTORY/end-RANK.pt. Ranks make no step beyond the number in DIRECTORY/allowed, so that who
deals faults can meet them at a step.
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

SAMPLES, BATCH, EVERY = 42, 4, 5
STEPS = -(-SAMPLES // BATCH)  # of an epoch


class Data(torch.utils.data.Dataset[tuple[int, Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 5, generator=generator)
        self.sizes = (1 + 4 * torch.rand(SAMPLES, generator=generator)).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        return index, self.x[index], self.x[index].sum(0, keepdim=True)


def wait_for(step: int, allowed: Path) -> None:
    while step > int(allowed.read_text() or 0):
        time.sleep(0.01)


def train(directory: Path, epochs: int) -> None:
    torch.manual_seed(3)
    data = Data()
    session = paceline.Session(data, global_batch=BATCH, seed=4, sizes=data.sizes)
    network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    model = session.wrap(network)
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), 0.02))
    loader = session.loader()
    session.checkpoint(directory / "checkpoints", model, optimizer, every_steps=EVERY)
    with (directory / f"steps-{session.rank}").open("a", buffering=1) as file:
        for _ in session.epochs(epochs):
            for indices, x, y in loader:
                batch = session.batch
                wait_for(batch.step, directory / "allowed")
                used = [] if batch.empty else indices.tolist()
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
                file.write(json.dumps([os.getpid(), batch.epoch, batch.step, used]) + "\n")
    parameters = [p.detach() for p in network.parameters()]
    torch.save(parameters, directory / f"end-{session.rank}.pt")
    session.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]), int(sys.argv[2]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
