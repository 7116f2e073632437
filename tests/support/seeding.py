"""Cases for ranks: data sets whose samples draw random numbers."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import paceline
from paceline.wire.synchronisation import Synchronisation
from support.relaxing import BATCH, SAMPLES, planned

Drawn = dict[tuple[int, int], list[float]]  # (epoch, sample) → its random numbers


class Noisy(torch.utils.data.Dataset[tuple[int, Tensor]]):
    """Sample i: i, and random numbers from each source that a data set may use."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        own = torch.rand((), dtype=torch.float64, generator=paceline.generator(index))
        numbers = [float(own), paceline.numpy_generator(index).random()]
        with paceline.seeded(index):
            numbers += [float(torch.rand(())), np.random.random(), random.random()]
        return index, torch.tensor(numbers, dtype=torch.float64)


def draw(
    count: int,
    options: dict[str, Any],
    loading: dict[str, Any],
    state: dict[str, Any] | None = None,
    save_at: int | None = None,
) -> tuple[Drawn, dict[str, Any]]:
    """What this rank's samples drew in two epochs, and where it left."""
    run = paceline.Session(Noisy(count), sizes=[1.0] * count, **options)
    torch.manual_seed(run.rank)  # the process's own random numbers differ, as ever
    random.seed(run.rank)
    np.random.seed(run.rank)
    drawn: Drawn = {}
    if state is not None:
        run.load_state_dict(state)
    loader = run.loader(**loading)
    for epoch in run.epochs(2):
        for indices, numbers in loader:
            if not run.batch.empty:
                drawn |= _of_batch(epoch, indices, numbers)
                _compare_with_body(run, indices, numbers)
            if run.step == save_at:
                left = run.state_dict()
                run.close()
                return drawn, left
    run.close()
    return drawn, {}


def _of_batch(epoch: int, indices: Tensor, numbers: Tensor) -> Drawn:
    return {
        (epoch, index): drawn
        for index, drawn in zip(indices.tolist(), numbers.tolist(), strict=True)
    }


def _compare_with_body(run: paceline.Session, indices: Tensor, numbers: Tensor) -> None:
    for index, drawn in zip(indices, numbers, strict=True):
        pair = [
            torch.rand((), dtype=torch.float64, generator=made)
            for made in (run.generator(index), run.generator(index), run.generator(index, stream=1))
        ]
        assert pair[0] == pair[1] != pair[2]
        assert not set(map(float, pair)) & set(drawn.tolist())  # the data set has others


def left_early(count: int, options: dict[str, Any], loading: dict[str, Any]) -> tuple[Drawn, Drawn]:
    """What samples drew in an epoch that was left after its first step, and in the next one."""
    run = paceline.Session(Noisy(count), sizes=[1.0] * count, **options)
    loader = run.loader(**loading)
    epochs: tuple[Drawn, Drawn] = ({}, {})
    for epoch in (0, 1):
        for indices, numbers in loader:
            if not run.batch.empty:
                epochs[epoch].update(_of_batch(epoch, indices, numbers))
            if epoch == 0:
                break
    run.close()
    return epochs


def taken_over(what: Synchronisation, slow_s: float) -> tuple[Drawn, int]:
    """What samples drew where ranks share batches, and how many batches this rank took over."""
    drawn: Drawn = {}
    taken = 0
    with planned([what], steps=8):
        run = paceline.Session(
            Noisy(SAMPLES), sizes=[1.0] * SAMPLES, global_batch=BATCH, seed=3, uneven_steps=True
        )
        model = run.wrap(nn.Linear(1, 1))
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        loader = run.loader(num_workers=1)
        for epoch in run.epochs(2):
            for indices, numbers in loader:
                time.sleep(slow_s if run.rank == run.world - 1 else 0.001)
                optimiser.zero_grad()
                model(numbers[:, :1].float()).mean().backward()
                optimiser.step()
                if not run.batch.empty:
                    drawn |= _of_batch(epoch, indices, numbers)
                taken += run._loop.running().step.planned is not None
        run.close()
    return drawn, taken
