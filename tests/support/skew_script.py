"""A training script that runs under this release and under 0.1.0, with little work to do.

python skew_script.py EPOCHS
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline

SAMPLES, BATCH = 96, 12
PER_EPOCH = SAMPLES // BATCH


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index].sum(0, keepdim=True)


def main(epochs: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # 0.1.0 does not do it
    sizes = [5.0 + index % 7 for index in range(SAMPLES)]
    session = paceline.Session(Data(), sizes=sizes, global_batch=BATCH, seed=4)
    model = session.wrap(nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = session.loader()
    for _ in session.epochs(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
