"""What ranks do in the tests of data that lives on nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline

SAMPLES, SIZE = 48, 50
ALL = list(range(SAMPLES))


def content(index: int) -> bytes:
    return bytes([index]) * SIZE


def decode(data: bytes, index: int) -> tuple[int, Tensor]:
    assert data == content(index)
    return index, torch.tensor([float(index)])


def train(
    url: str, directories: list[str], limit: int, epochs: int, options: dict[str, Any]
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """The samples of each epoch on this rank, and what it would tell of each epoch."""
    rank = dist.get_rank()
    data = paceline.data.Sharded(
        paceline.data.Ranges(url, np.arange(SAMPLES + 1) * SIZE),
        directory=directories[rank],
        limit_bytes=limit,
        decode=decode,
    )
    session = paceline.Session(data, global_batch=8, seed=1)
    sent: list[Any] = []
    assert session._loop.context.data is not None
    session._loop.context.data.send = sent.append
    model = session.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)
    loader = session.loader(**options)
    used: list[list[int]] = []
    for _ in session.epochs(epochs):
        used.append([])
        for indices, x in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
            if not session.batch.empty:
                used[-1] += indices.tolist()
    session.close()
    return used, [{name: getattr(each, name) for name in each.__struct_fields__} for each in sent]


def read_beside(directory: str, options: dict[str, Any]) -> tuple[int, int]:
    """Reads that its one epoch is said to have missed, where the script reads beside the loop."""
    source = paceline.data.Ranges(__file__, list(range(9)))
    data = paceline.data.Sharded(source, directory=directory, limit_bytes=1)
    for _ in range(10):
        data[7]
    session = paceline.Session(data, global_batch=2, seed=1)
    sent: list[Any] = []
    assert session._loop.context.data is not None
    session._loop.context.data.send = sent.append
    trained = 0
    for _ in session.epochs(1):
        for batch in session.loader(**options):
            trained += len(batch)
            for index in range(1, 8):
                data[index]
    session.close()
    return sent[0].read, trained


def plain_on_rank_1(directory: str) -> None:
    data: Any = list(range(4))
    if dist.get_rank() != 1:
        source = paceline.data.Ranges(__file__, [0, 1, 2, 3, 4])
        data = paceline.data.Sharded(source, directory=directory, limit_bytes=9)
    paceline.Session(data, global_batch=2)


def other_data(directory: str, samples: int) -> str:
    source = paceline.data.Ranges(__file__, list(range(samples + 1)))
    data = paceline.data.Sharded(source, directory=directory, limit_bytes=9)
    try:
        paceline.Session(data, global_batch=2).close()
    except paceline.PacelineError as error:
        return str(error)
    return ""


def settled(directories: list[str], offsets: list[list[int]], limits: list[int]) -> str:
    rank = dist.get_rank()
    source = paceline.data.Ranges(__file__, offsets[rank])
    data = paceline.data.Sharded(source, directory=directories[rank], limit_bytes=limits[rank])
    try:
        paceline.Session(data, global_batch=2).close()
    except ValueError as error:
        return str(error)
    return ""
