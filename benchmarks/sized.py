"""A training script of the benchmarks: a tiny model, and samples whose sizes are drawn."""

from __future__ import annotations

import argparse

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import paceline


class Sized(Dataset[torch.Tensor]):
    """Samples that differ only in their declared sizes."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes.tolist()

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.sizes)

    def __getitem__(self, index: int) -> torch.Tensor:
        """Eight numbers."""
        return torch.full((8,), float(index % 7))


def drawn(samples: int, mean: float, spread: float, seed: int) -> np.ndarray:
    """Lognormal sizes from 1 to 20 times their mean; spread 0: all sizes are the same."""
    sizes = np.random.default_rng(seed).lognormal(0.0, spread, samples)
    return np.clip(np.rint(mean * sizes / sizes.mean()), 1, 20 * mean)


def main() -> None:
    """Trains until it is stopped."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--samples", type=int, default=2048)
    options.add_argument("--mean", type=float, default=400.0)
    options.add_argument("--spread", type=float, default=1.0)
    options.add_argument("--batch", type=int, default=64)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data = Sized(drawn(given.samples, given.mean, given.spread, given.seed))
    session = paceline.Session(data, sizes=data.sizes, global_batch=given.batch, seed=given.seed)
    loader = session.loader()
    model = session.wrap(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in session.epochs(10_000):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
