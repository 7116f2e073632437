"""Keeps a filler out of what a model counts by itself, such as running means or a codebook's usage.

A rank without samples computes a filler, whose gradient does not count. The model's buffers must
not take it in either. Where the model adds its counts up over the ranks in its forward pass, the
filler adds zero to the sum. Other collectives of the forward pass, such as a gather or a mean, take
the filler in, with a warning. After any of them this rank's buffers change as those of the other
ranks do; otherwise they are as before the forward pass.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

logger = logging.getLogger(__name__)

_warned = set[str]()  # names of collectives


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
    from paceline.train.sync.uneven import listen  # it imports this module

    # BatchNorm layers that Paceline adapted leave fillers out by themselves.
    layers = (m for m in module.modules() if not getattr(m, "leaves_fillers_out", False))
    restore, thread = kept_buffers(layers), threading.get_ident()
    over_ranks = False

    def leave_out(name: str, group: dist.ProcessGroup, args: tuple[Any, ...]) -> None:
        nonlocal over_ranks
        if threading.get_ident() != thread or current.reduces or group.size() != current.world:
            return
        over_ranks = True
        if name == "allreduce" and _is_sum(args[1:]):
            for tensor in [args[0]] if isinstance(args[0], torch.Tensor) else args[0]:
                tensor.detach().zero_()
        elif name not in _warned:
            _warned.add(name)
            logger.warning(
                "a rank without samples computes a filler, and the forward pass of its model calls "
                "%s: what the model keeps of that has the filler in it. Sums over ranks leave it "
                "out",
                name.strip("_"),
            )

    end = listen(leave_out)
    try:
        yield
    finally:
        end()
        if not over_ranks:
            restore()


def kept_buffers(layers: Iterable[nn.Module]) -> Callable[[], None]:
    """Return what puts the buffers of layers back: the tensors, and their values.

    Args:
        layers: without those inside them.
    """
    kept = [(layer._buffers, dict(layer._buffers)) for layer in layers]
    values = [(b, b.detach().clone()) for _, of in kept for b in of.values() if b is not None]

    def restore() -> None:
        for buffers, before in kept:
            buffers.update(before)
        for buffer, value in values:
            # A backward pass through a buffer that was changed is a filler's, and counts not.
            buffer.data.copy_(value)

    return restore


def _is_sum(options: tuple[Any, ...]) -> bool:
    """Whether an all-reduce adds up, which it does by default."""
    op = getattr(options[0], "reduceOp", options[0]) if options else None
    return op is None or op == dist.ReduceOp.SUM
