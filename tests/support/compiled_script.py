"""A small compiled model on ranks of uneven speeds, with numbers of samples on a grid.

python compiled_script.py DIRECTORY: each rank writes DIRECTORY/RANK.json, a list of [samples of the
batch that the loader gave, samples that count, weight] for each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

SAMPLES, BATCH, GRID, EPOCHS = 156, 24, 4, 24


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 5, generator=generator)
        self.sizes = (1 + 4 * torch.rand(SAMPLES, generator=generator)).tolist()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


def train(directory: Path) -> None:
    torch.manual_seed(3)
    data = Data()
    session = paceline.Session(data, global_batch=BATCH, sizes=data.sizes, shapes=GRID)
    network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    model = session.wrap(torch.compile(network, backend="eager", dynamic=False))
    optimizer = session.optimizer(torch.optim.AdamW(model.parameters(), 0.02))
    loader = session.loader()
    seen = []
    for _ in session.epochs(EPOCHS):
        for x, y in loader:
            batch = session.batch
            seen.append([len(x), batch.samples, batch.weight])
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    (directory / f"{session.rank}.json").write_text(json.dumps(seen))
    session.close()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
