"""Keeps a filler out of what a model counts by itself, such as running means or a codebook's usage.

A rank without samples computes a filler, whose gradient does not count. The model's buffers must
not take it in either. Where the model adds its counts up over the ranks in its forward pass, the
filler adds zero to the sum, and this rank's buffers change as those of the other ranks do.
Otherwise they are as before the forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn


class Current(Protocol):
    """What is asked of the current step of a session."""

    world: int
    reduces: bool  # in the call of a collective that is not the script's


@contextmanager
def uncounted(module: nn.Module, current: Current) -> Iterator[None]:
    """Around a forward pass of a model with a filler.

    Args:
        module: the model.
        current: the current step of the session.
    """
    # BatchNorm layers that Paceline adapted leave fillers out by themselves.
    layers = (m for m in module.modules() if not getattr(m, "leaves_fillers_out", False))
    buffers = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]
    kept = [(buffer, buffer.detach().clone()) for buffer in buffers]
    original, thread = vars(dist.ProcessGroup)["allreduce"], threading.get_ident()
    summed = False

    def allreduce(group: Any, tensors: Any, *options: Any, **named: Any) -> Any:
        nonlocal summed
        mine = threading.get_ident() == thread and not current.reduces
        if mine and group.size() == current.world and _is_sum(options, named):
            summed = True
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
                tensor.detach().zero_()
        return original(group, tensors, *options, **named)

    dist.ProcessGroup.allreduce = allreduce  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        dist.ProcessGroup.allreduce = original  # type: ignore[method-assign]
        if not summed:
            for buffer, value in kept:
                # A backward pass through a buffer that was changed is a filler's, and counts not.
                buffer.data.copy_(value)


def _is_sum(options: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether an all-reduce adds up, which it does by default."""
    given = options[0] if options else named.get("opts", named.get("op"))
    op = getattr(given, "reduceOp", given)
    return op is None or op == dist.ReduceOp.SUM
