"""A small training script with faults that `paceline doctor` is to find."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, IterableDataset

import paceline

WIDTH, CLASSES = 3, 4


class Series(Dataset[tuple[Tensor, int]]):
    """Series of 3 to 40 points, and of one length with the fault "alike"."""

    def __init__(self, count: int, faults: set[str]) -> None:
        draw = torch.Generator().manual_seed(0)
        lengths = [9] * count if "alike" in faults else [3 + i * 7 % 38 for i in range(count)]
        self.items = [torch.randn(length, WIDTH, generator=draw) for length in lengths]
        self.faults = faults
        if "alike" not in faults:
            self.sizes = lengths

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        series = self.items[index]
        with paceline.seeded(index) if "seeded" in self.faults else nullcontext():
            if self.faults & {"augmented", "seeded"}:
                series = series + torch.randn_like(series)
        return series, index % CLASSES


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(1)


class Net(nn.Module):
    """A layer for each point, and the mean over a series' points."""

    def __init__(self, faults: set[str]) -> None:
        super().__init__()
        self.faults = faults
        self.point = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU())
        self.norm = nn.BatchNorm1d(8) if "local" in faults else nn.Identity()
        self.dropout = nn.Dropout(0.5 if "dropout" in faults else 0.0)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, series: Tensor, lengths: Tensor) -> Tensor:
        made = self.norm(self.point(series).transpose(1, 2))
        inside = (torch.arange(series.shape[1]) < lengths[:, None])[:, None]
        if "padding" in self.faults:
            pooled = made.mean(2)
        else:
            pooled = (made * inside).sum(2) / inside.sum(2)
        return self.head(self.dropout(pooled))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--faults", default="")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    faults = set(options.faults.split(","))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = Series(options.count, faults)

    def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
        series = nn.utils.rnn.pad_sequence([s for s, _ in items], batch_first=True)
        if "collate" in faults:
            series = series * torch.rand(())
        lengths = torch.tensor([len(s) for s, _ in items])
        return series, lengths, torch.tensor([label for _, label in items])

    if "sleeps" in faults:
        time.sleep(3600)
    model: Any = Net(faults)
    if "sharded" in faults:
        from torch.distributed.fsdp import fully_shard  # import takes a second

        fully_shard(model)
    given: Any = Endless() if "iterable" in faults else data
    if "stream" in faults:
        items = [data[index] for index in range(len(data))]
        given = paceline.data.Stream(items, size=lambda item: len(item[0]), split="none")
    session = paceline.Session(given, global_batch=16)
    loader = session.loader(collate_fn=collate, num_workers=options.workers)
    if "wrap" not in faults:
        model = session.wrap(model, batchnorm="local" if "local" in faults else None)
    second = nn.Linear(CLASSES, 1)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1)]
    if "second" in faults:
        optimizers.append(torch.optim.SGD(second.parameters(), 0.1))
    if "two" in faults:
        optimizers.append(torch.optim.SGD(model.parameters(), 0.1))
    if not faults & {"wrap", "checkpoint", "stream"}:
        session.checkpoint(options.folder / "checkpoints", model, optimizers[0], every_steps=1)

    if "states" in faults:
        session.load_state_dict(state=session.state_dict())

    for _ in range(1):
        for step, (series, lengths, labels) in enumerate(loader):
            if step == 1 and rank == 1 and "raises" in faults:
                raise KeyError("no such recording")
            if step == 1 and rank == 1 and "dies" in faults:
                os.kill(os.getpid(), signal.SIGKILL)
            with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in faults):
                out = model(series, lengths).float()
            loss = cross_entropy(out, labels)
            if "second" in faults:
                loss = loss + second(out).square().mean()
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            if "states" in faults:
                torch.save(session.state_dict(), options.folder / f"{rank}.pt")
    (options.folder / "trained").touch()


if __name__ == "__main__":
    main()
