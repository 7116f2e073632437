"""A training script that compares each step's gradient with that of a single process.

python chain_script.py DIRECTORY: trains until DIRECTORY/enough exists, then to its epoch's end.
Rank 0 writes a line of JSON for each step to DIRECTORY/errors-0: [step, relative error].
"""

from __future__ import annotations

import copy
import json
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import paceline

WIDTH, CLASSES, SAMPLES, GLOBAL_BATCH = 8, 3, 600, 48


class Recordings(torch.utils.data.Dataset[tuple[int, Tensor, int]]):
    """Sample i: i, frames, class."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(SAMPLES).log_normal_(4.5, 0.6, generator=generator)
        self.sizes = lengths.clamp(10, 800).int().tolist()
        self.frames = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.classes = torch.randint(0, CLASSES, (SAMPLES,), generator=generator).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return index, self.frames[index], self.classes[index]


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def single_process(model: nn.Module, data: Recordings, samples: list[int]) -> Tensor:
    """The gradient of the mean loss over a global batch."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    classes = torch.tensor(data.classes)[samples]
    cross_entropy(alone(data.frames[samples]), classes).backward()
    return gradient(alone)


def train(directory: Path) -> None:
    data = Recordings()
    session = paceline.Session(data, global_batch=GLOBAL_BATCH, seed=4)
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))
    model: Any = session.wrap(network)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = session.loader()
    with (directory / f"errors-{session.rank}").open("w") as file:
        for _ in session.epochs(100_000):
            for indices, x, classes in loader:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), classes)
                loss.backward()
                parts: list[Any] = [None] * session.world
                dist.all_gather_object(parts, [] if session.batch.empty else indices.tolist())
                if session.rank == 0:
                    want = single_process(model.module, data, list(chain(*parts)))
                    error = float((gradient(model) - want).norm() / want.norm())
                    file.write(json.dumps([session.batch.step, error]) + "\n")
                optimizer.step()
                session.log(loss=loss)
            enough = [(directory / "enough").exists()]
            dist.broadcast_object_list(enough)
            if enough[0]:
                break
    session.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()
