"""A training on a stream, for the tests that run it under a control plane.

Arguments: a folder for what each rank trained; the kind of stream; epochs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import paceline

SAMPLES, SHARD, BATCH, BUFFER = 1000, 50, 20, 160


def size_of(sample: int) -> float:
    return 1.0 + sample * 7919 % 13


class Numbers(torch.utils.data.IterableDataset[int]):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


def shard(number: int) -> Numbers:
    return Numbers(range(number * SHARD, (number + 1) * SHARD))


def stream(kind: str, rank: int, world: int) -> paceline.data.Stream:
    """A stream of `SAMPLES` numbers; of the kind "ranks", rank 0 has the longest part."""
    if kind == "shards":
        shards = range(SAMPLES // SHARD)
        return paceline.data.Stream.shards(shards, shard, size=size_of, buffer=BUFFER)
    numbers = range(SAMPLES)
    if kind == "ranks":
        first = SAMPLES // 2
        each = (SAMPLES - first) // (world - 1)
        numbers = range(first) if rank == 0 else numbers[first + (rank - 1) * each :][:each]
    return paceline.data.Stream(Numbers(numbers), size=size_of, split=kind, buffer=BUFFER)


def collate(samples: list[int]) -> tuple[list[int], Tensor]:
    return samples, torch.tensor(samples, dtype=torch.float32)[:, None] / SAMPLES


def main(folder: str, kind: str, epochs: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    session = paceline.Session(stream(kind, rank, world), global_batch=BATCH)
    loader = session.loader(collate_fn=collate)
    model = session.wrap(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    used: list[list[int]] = []
    for _ in session.epochs(epochs):
        used.append([])
        for samples, x in loader:
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            optimizer.step()
            session.log(loss=loss)
            if not session.batch.empty:
                used[-1] += samples
    (Path(folder) / f"{rank}.json").write_text(json.dumps(used))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
