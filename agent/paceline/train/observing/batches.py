"""Sizes of batches, estimated from their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Levels of nesting that are searched for tensors, and items of each container.
_DEEP = 4
_MANY = 64


@dataclass(frozen=True)
class BatchSize:
    """Size of a batch, or of several batches that were trained in one step.

    Args:
        samples: number of samples n.
        load: elements of the largest tensor, padding included.
        squares: Σ over samples of (elements of a sample)², as if samples of a batch were equal.
        longest: elements of a sample, in the batch with the largest samples.
    """

    samples: int
    load: float
    squares: float
    longest: float

    def __add__(self, other: BatchSize) -> BatchSize:
        return BatchSize(
            self.samples + other.samples,
            self.load + other.load,
            self.squares + other.squares,
            max(self.longest, other.longest),
        )


NOTHING = BatchSize(0, 0.0, 0.0, 0.0)


def size_of(batch: Any, samples: int | None = None) -> BatchSize:
    """Return the size of a batch or of a model's input: tensors in lists, tuples and mappings.

    The number of samples is the first dimension of the first tensor that has one, else `samples`,
    the batch size of the loader's batch sampler, else 1.
    """
    first, most = None, 0
    for tensor in _tensors(batch, _DEEP):
        if tensor.ndim:
            first = int(tensor.shape[0]) if first is None else first
            most = max(most, tensor.numel())
    count = first or samples or 1
    load = float(most or count)
    return BatchSize(count, load, load * load / count, load / count)


def _tensors(value: Any, deep: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif deep and isinstance(value, Mapping):
        for each in list(value.values())[:_MANY]:
            yield from _tensors(each, deep - 1)
    elif deep and isinstance(value, list | tuple):
        for each in value[:_MANY]:
            yield from _tensors(each, deep - 1)
