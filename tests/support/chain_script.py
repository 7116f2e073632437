"""A training script whose every step can be looked at afterwards: handwritten digits.

python chain_script.py DIRECTORY SEED [EPOCHS]: trains so many epochs, or until DIRECTORY/enough
exists, then to its epoch's end. Rank 0 writes to DIRECTORY/rows.npy its parameters and its gradient
before each step of the optimiser, and to DIRECTORY/losses the held-out loss after each epoch.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

import paceline

WIDTH, CLASSES, SAMPLES, GLOBAL_BATCH = 64, 10, 1198, 48
RATE = 0.1  # so low that gradients some rounds old do no harm; with momentum 0.5


class Digits(torch.utils.data.Dataset[tuple[int, Tensor, int]]):
    """scikit-learn's handwritten digits; sample i: i, pixels, class. Their sizes are drawn."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.empty(SAMPLES).log_normal_(4.5, 0.6, generator=generator)
        self.sizes = lengths.clamp(10, 800).int().tolist()
        pixels, classes = _digits(generator)
        self.pixels, self.classes = pixels[:SAMPLES], classes[:SAMPLES]
        self.held_out = pixels[SAMPLES:], classes[SAMPLES:]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return index, self.pixels[index], int(self.classes[index])


def _digits(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """All of them in random order: pixels [1797, 64] and classes [1797]."""
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    (folder,) = spec.submodule_search_locations or []
    # Not by `load_digits`, whose import takes each rank two seconds.
    table = np.loadtxt(Path(folder) / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    shuffled = torch.from_numpy(table)[torch.randperm(len(table), generator=generator)]
    pixels = shuffled[:, :-1].float()
    return (pixels - pixels.mean()) / pixels.std(), shuffled[:, -1].long()


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def parameters(model: nn.Module) -> Tensor:
    return parameters_to_vector(model.parameters()).detach()


def gradient(model: nn.Module) -> Tensor:
    return parameters_to_vector(
        torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()
    )


def held_out_loss(model: nn.Module, data: Digits) -> float:
    pixels, classes = data.held_out
    with torch.no_grad():
        return float(cross_entropy(model(pixels), classes))


def train(directory: Path, seed: int, epochs: int) -> None:
    data = Digits()
    session = paceline.Session(data, global_batch=GLOBAL_BATCH, seed=seed)
    torch.manual_seed(seed)
    alone = network()
    model: Any = session.wrap(alone)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.5)
    loader = session.loader()
    rows: list[Tensor] = []
    losses: list[float] = []
    for _ in session.epochs(epochs):
        for _, pixels, classes in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(pixels), classes)
            loss.backward()
            if session.rank == 0:
                rows.append(torch.stack([parameters(alone), gradient(alone)]))
            optimizer.step()
            session.log(loss=loss)
        losses.append(held_out_loss(alone, data))
        enough = [(directory / "enough").exists()]
        dist.broadcast_object_list(enough)
        if enough[0]:
            break
    session.close()
    if session.rank == 0:
        np.save(directory / "rows.npy", torch.stack(rows).numpy())
        (directory / "losses").write_text(json.dumps(losses))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    directory, seed, *most = sys.argv[1:]
    train(Path(directory), int(seed), int(most[0]) if most else 100_000)
    dist.destroy_process_group()
