"""Fillers that do not change a model's own statistics, such as running means or codebook usage.

A rank that has no samples in a step computes a filler, a sample whose gradient does not count. The
filler must not change the model's buffers either. If the model's forward pass sums values over the
ranks, such as counts, the filler adds zero to the sum. Other collectives of the forward pass, such
as a gather or a mean, include the filler, and a warning is logged. After a forward pass with a
collective, this rank's buffers keep their new values, as on the other ranks. After a forward pass
without a collective, this rank's buffers are restored.
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

from paceline.train.collectives import listen

logger = logging.getLogger(__name__)

_warned = set[str]()


class Current(Protocol):
    """The attributes of `ddp.CurrentStep` that this module uses."""

    world: int
    reduces: bool


@contextmanager
def uncounted(module: nn.Module, current: Current) -> Iterator[None]:
    """Leave a filler out of a model's buffers during a forward pass."""
    # BatchNorm layers that Paceline adapted leave fillers out automatically.
    layers = (m for m in module.modules() if not getattr(m, "leaves_fillers_out", False))
    restore = kept_tensors([layer._buffers for layer in layers])
    thread = threading.get_ident()
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
                "a rank without samples computes a filler sample, and its model's forward pass "
                "calls %s: buffers that the model computes from the result include the filler. "
                "Paceline can leave fillers out only of sums: use all_reduce with SUM",
                name.strip("_"),
            )

    end = listen(leave_out)
    try:
        yield
    finally:
        end()
        if not over_ranks:
            restore()


def kept_tensors(places: Iterable[dict[str, Any]]) -> Callable[[], None]:
    """Save the tensors in some dictionaries; return a function that restores them."""
    kept = [(of, {k: v for k, v in of.items() if v is None or _is_state(v)}) for of in places]
    values = [(v, v.detach().clone()) for _, of in kept for v in of.values() if v is not None]

    def restore() -> None:
        for of, before in kept:
            of.update(before)
        for tensor, value in values:
            # Writing to `data` hides the change from autograd. That is safe, because only the
            # filler's backward pass can use the buffer, and its gradient does not count.
            tensor.data.copy_(value)

    return restore


def _is_state(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _is_sum(options: tuple[Any, ...]) -> bool:
    op = getattr(options[0], "reduceOp", options[0]) if options else None
    return op is None or op == dist.ReduceOp.SUM
