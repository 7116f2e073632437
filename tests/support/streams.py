"""Cases for ranks: training on streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import mse_loss

import paceline
from paceline.data import Stream
from support.sessions import Numbered, network, parameters

SAMPLES, BATCH, BUFFER = 120, 8, 32


class Numbers(torch.utils.data.IterableDataset[int]):
    """Some numbers; asked for the one `fails_at`, it raises."""

    def __init__(self, numbers: range, fails_at: int = -1) -> None:
        self.numbers, self.fails_at = numbers, fails_at
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        for number in self.numbers:
            if number == self.fails_at:
                raise OSError("the disk is gone")
            yield number


def size_of(sample: int) -> float:
    return 1.0 + sample % 5


@dataclass
class Trained:
    steps: list[list[int]] = field(default_factory=list)  # its samples of each step
    weights: list[float] = field(default_factory=list)
    parameters: Tensor = field(default_factory=lambda: torch.empty(0))
    state: dict[str, Any] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    length: str = ""


def parts(parts_of: list[range], **options: Any) -> Stream:
    """A stream of which each rank has its own part."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    options = {"size": size_of, "buffer": BUFFER} | options
    return Stream(Numbers(parts_of[rank]), split="ranks", **options)


def train(
    stream: Stream,
    epochs: int = 1,
    leave_at: int | None = None,
    state: dict[str, Any] | None = None,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> Trained:
    trained, data = Trained(), Numbered(SAMPLES)

    def collate(samples: list[int]) -> tuple[list[int], Tensor, Tensor]:
        return samples, data.x[samples], data.y[samples]

    with closing(paceline.Session(stream, global_batch=BATCH, **options)) as session:
        if state is not None:
            session.load_state_dict(state)
        loader = session.loader(collate_fn=collate, **(loading or {}))
        model = session.wrap(network())
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for epoch in session.epochs(epochs):
            trained.epochs.append(epoch)
            for samples, x, y in loader:
                optimizer.zero_grad()
                mse_loss(model(x), y).backward()
                optimizer.step()
                trained.steps.append([] if session.batch.empty else samples)
                trained.weights.append(session.batch.weight)
                if session.step == leave_at:
                    break
            trained.state = session.state_dict()
        try:
            len(loader)
        except TypeError as error:
            trained.length = str(error)
        trained.parameters = parameters(model)
    return trained


def uneven(parts_of: list[range], epochs: int = 1, leave_at: int | None = None) -> Trained:
    return train(parts(parts_of), epochs, leave_at)


def resumed(state: dict[str, Any]) -> Trained:
    return train(parts([range(60), range(60, SAMPLES)]), epochs=2, state=state)


def failing() -> str:
    rank = dist.get_rank()
    source = Numbers(range(60), fails_at=40 if rank == 1 else -1)
    try:
        train(Stream(source, size=size_of, split="ranks", buffer=BUFFER))
    except paceline.PacelineError as error:
        return str(error)
    return ""


def shard(number: int) -> Numbers:
    return Numbers(range(number * 10, number * 10 + 10))


def failing_shard(number: int) -> Numbers:
    return Numbers(range(number * 10, number * 10 + 10), fails_at=15)


def read_by_processes(kind: str) -> Trained:
    shards = Stream.shards(range(SAMPLES // 10), shard, size=size_of, buffer=BUFFER)
    whole = Stream(Numbers(range(SAMPLES)), size=size_of, split="none", buffer=BUFFER)
    return train(shards if kind == "shards" else whole, 2, loading={"num_workers": 2})


class Sharing(torch.utils.data.IterableDataset[int]):
    """Numbers that are shared among the processes of a loader, as many sources do."""

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        return iter(self.numbers if info is None else self.numbers[info.id :: info.num_workers])


def sharing_shard(number: int) -> Sharing:
    return Sharing(range(number * 10, number * 10 + 10))


def numbers_of(shards: list[range]) -> Iterator[dict[str, int]]:
    for part in shards:
        for number in part:
            yield {"number": number}


def size_of_row(row: dict[str, int]) -> float:
    return size_of(row["number"])


def numbers_of_rows(rows: list[dict[str, int]]) -> list[int]:
    return [row["number"] for row in rows]


def read_rows(stream: Stream, processes: int) -> list[list[int]]:
    """The numbers of each step of one epoch, of a stream of rows."""
    with closing(paceline.Session(stream, global_batch=BATCH)) as session:
        loading = session.loader(num_workers=processes, collate_fn=numbers_of_rows)
        return list(loading)


def other_streams() -> None:
    train(parts([range(9)] * 2, buffer=BUFFER + dist.get_rank()))


def by_one_process(steps: list[list[int]]) -> Tensor:
    """The parameters after these global batches, trained in one process."""
    data, model = Numbered(SAMPLES), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for samples in steps:
        optimizer.zero_grad()
        mse_loss(model(data.x[samples]), data.y[samples]).backward()
        optimizer.step()
    return parameters(model)
