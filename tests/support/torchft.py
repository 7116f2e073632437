"""The training of the tests of torchft: data, network and loss, and the same in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.train.epochs import epoch_order

BATCH, EPOCHS, SAMPLES = 24, 6, 128  # an epoch's sixth batch has eight samples
STEPS = -(-SAMPLES // BATCH) * EPOCHS
SIZES = (np.random.default_rng(0).integers(1, 9, SAMPLES)).tolist()
_DRAWN = torch.Generator().manual_seed(1)
DATA = torch.randn(SAMPLES, 5, generator=_DRAWN, dtype=torch.float64)
LABELS = torch.randn(SAMPLES, 1, generator=_DRAWN, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_of(model: nn.Module, indices: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(DATA[indices]), LABELS[indices])


def global_batch(step: int) -> list[int]:
    epoch, step = divmod(step, STEPS // EPOCHS)
    order: list[int] = epoch_order(SAMPLES, 0, epoch).tolist()
    return order[step * BATCH :][:BATCH]


def trained_alone() -> dict[str, torch.Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, global_batch(step)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict()
