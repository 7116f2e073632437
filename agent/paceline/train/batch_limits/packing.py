"""Packs sequences end to end, so that a batch has no padding: a collate function and its batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Sequences end to end: n sequences with T positions in total.

    The fields are the arguments of attention over sequences of different lengths, such as
    ``flash_attn_varlen_func`` of FlashAttention. `values` has one tensor, [T, …], for each field of
    the samples. `position_ids` counts 0, 1, … in each sequence, [T]. Sequence i has the positions
    from ``cu_seqlens[i]`` to ``cu_seqlens[i + 1] - 1``; `cu_seqlens` is int32, [n + 1].
    `max_seqlen` is the length of the longest sequence.
    """

    values: tuple[Tensor, ...]
    position_ids: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def packed(samples: Sequence[Tensor | Sequence[Tensor]]) -> Packed:
    """Put a batch's sequences end to end, in order.

    Use this function as a collate function: ``session.loader(collate_fn=packed)``.

    Args:
        samples: for each sample a tensor, [L_i, …], or a tuple of tensors of the same length L_i,
            such as tokens and labels. At least one sample.

    Raises:
        TypeError: a sample is neither a tensor nor a tuple of tensors.
        ValueError: there is no sample, a sample's tensors differ in length, or samples have
            different numbers of tensors.
    """
    if not samples:
        raise ValueError("packed: the list of samples is empty")
    fields = [_fields(sample, number) for number, sample in enumerate(samples)]
    if len({len(of_sample) for of_sample in fields}) > 1:
        raise ValueError("packed: samples have different numbers of tensors")
    lengths = torch.tensor([len(of_sample[0]) for of_sample in fields])
    ends = lengths.cumsum(0)
    starts = torch.repeat_interleave(ends - lengths, lengths)
    return Packed(
        values=tuple(torch.cat(of_field) for of_field in zip(*fields, strict=True)),
        position_ids=torch.arange(int(ends[-1])) - starts,
        cu_seqlens=torch.nn.functional.pad(ends, (1, 0)).to(torch.int32),
        max_seqlen=int(lengths.max()),
    )


def _fields(sample: Tensor | Sequence[Tensor], number: int) -> tuple[Tensor, ...]:
    fields = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    if not fields or not all(isinstance(each, Tensor) and each.dim() for each in fields):
        raise TypeError(
            f"packed: sample {number} of the batch is neither a tensor with a length dimension nor "
            "a tuple of such tensors: let the data set return one of these"
        )
    if len({len(each) for each in fields}) > 1:
        raise ValueError(
            f"packed: the tensors of sample {number} of the batch have lengths "
            f"{[len(each) for each in fields]}: they must be equal"
        )
    return fields
