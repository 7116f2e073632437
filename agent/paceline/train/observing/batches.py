"""How large a batch is, as far as its tensors tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

_DEEP = 4  # levels of a batch that are looked at
_MANY = 64  # items of each


@dataclass(frozen=True)
class BatchSize:
    """The size of a batch, or of several that were trained in one step.

    Args:
        samples: n.
        load: elements of the largest tensor, padding included.
        squares: Σ over samples of (elements of a sample)², as if samples of a batch were alike.
        longest: elements of a sample of the batch with the largest ones.
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
    """The size of what a loader gives, or a model gets.

    Args:
        batch: tensors, in lists, tuples and mappings.
        samples: what the loader's batch sampler says; None: it says nothing.

    Returns:
        Samples by the first dimension of the first tensor that has one, else by the sampler. One
        sample where neither tells.
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
