"""Cases for ranks: training whose segments have one synchroniser after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import msgspec
import torch
from torch import Tensor, nn

import paceline
from paceline.leader import Leader
from paceline.wire import ALLREDUCE, Segment, Synchronisation

SAMPLES, BATCH, WIDTH = 192, 12, 5


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, WIDTH, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


@contextmanager
def planned(chain: list[Synchronisation]) -> Iterator[None]:
    """Coasted segments of four steps, each with the next synchroniser; the first has none."""
    coasted = Leader._coasted

    def next_one(leader: Leader) -> Segment:
        leader._coast_steps = 4
        made = coasted(leader)
        what = chain[(leader.seq - 1) % len(chain)] if leader.seq else ALLREDUCE
        return msgspec.structs.replace(made, synchroniser=what)

    with (
        mock.patch("paceline.leader.MOST_COASTED", 4),
        mock.patch.object(Leader, "_coasted", next_one),
    ):
        yield


def train(chain: list[Synchronisation], optimisers: int = 1) -> dict[str, Any]:
    """Two epochs; what this rank's replica is then."""
    torch.manual_seed(0)
    samples = 0
    with planned(chain):
        session = paceline.Session(Data(), global_batch=BATCH, seed=3)
        network = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))
        model = session.wrap(network)
        groups = [list(network[0].parameters()), list(network[2].parameters())]
        given = groups if optimisers == 2 else [[{"params": group} for group in groups]]
        made = [torch.optim.SGD(params, 0.01, momentum=0.5) for params in given]
        loader = session.loader()
        for _ in range(2):
            for x, y in loader:
                for optimiser in made:
                    optimiser.zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                for optimiser in made:
                    optimiser.step()
                samples += session.batch.samples
        session.close()
    state = [*network.state_dict().values()]
    for optimiser in made:
        state += [one["momentum_buffer"] for one in optimiser.state.values()]
    return {"replica": [one.tolist() for one in state], "samples": samples}
