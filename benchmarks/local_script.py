"""Training script of `local.py`: a loop whose ranks have emulated speeds.

Each rank writes, for each epoch, its duration and the number of samples that it trained, and its
weights at the end. Rank 0 also writes the number of steps by the source of their plan.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline


class Lengths(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Samples with lognormal sizes."""

    def __init__(self, count: int) -> None:
        self.sizes = np.random.default_rng(0).lognormal(3, 0.8, count)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), index / len(self), dtype=torch.float64), torch.tensor(index % 7.0)


def main(folder: Path, samples: int, global_batch: int, epochs: int) -> None:
    """Train, and write the results to the folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    session = paceline.Session(Lengths(samples), global_batch=global_batch, seed=1)
    loader = session.loader()
    model = session.wrap(nn.Linear(4, 1).double())
    optimizer = session.optimizer(torch.optim.SGD(model.parameters(), 0.01))
    made = []
    for _ in session.epochs(epochs):
        began, counts, sources = time.perf_counter(), 0, dict[str, int]()
        for x, y in loader:
            counts += session.batch.samples
            loss = mse_loss(model(x).squeeze(1), y.double())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            wiring = session._loop.wiring
            if wiring is not None and wiring.leader is not None and wiring.leader._last is not None:
                source = wiring.leader._last.source
                sources[source] = sources.get(source, 0) + 1
        made.append({"s": time.perf_counter() - began, "samples": counts, "sources": sources})
    weights = [p.detach().flatten().tolist() for p in model.parameters()]
    session.close()
    part = folder / f"rank-{rank}.part"
    part.write_text(json.dumps({"epochs": made, "weights": weights}))
    part.rename(folder / f"rank-{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
