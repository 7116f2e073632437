"""Between an optimiser's parameters and one flat vector: gradients out, sums in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class Flat:
    """Gradients of parameters as a vector, with which of them there are and the learning rates.

    A sum of such vectors tells the summed gradients, of which parameters anyone had a gradient, and
    the contributors' mean learning rates: so all replicas apply it alike, wherever their schedules
    are. On the CPU, in 32 bits.

    Args:
        parameters: that are trained, in the same order on all ranks.
        groups: parameter groups of the optimiser.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], groups: int) -> None:
        self.parameters = list(parameters)
        self._ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        self._groups = groups

    @property
    def length(self) -> int:
        """Of a vector."""
        return (self._ends[-1] if self._ends else 0) + len(self.parameters) + 1 + self._groups

    def read(self, optimiser: torch.optim.Optimizer) -> torch.Tensor:
        """The vector of what is in ``.grad`` now, and of one contributor."""
        vector = torch.zeros(self.length)
        start, used = 0, self._ends[-1]
        for k, (parameter, end) in enumerate(zip(self.parameters, self._ends, strict=True)):
            if parameter.grad is not None:
                vector[start:end] = parameter.grad.detach().reshape(-1)
                vector[used + k] = 1
            start = end
        at = used + len(self.parameters)
        vector[at] = 1
        for k, group in enumerate(optimiser.param_groups):
            vector[at + 1 + k] = float(group["lr"])
        return vector

    def write(self, vector: torch.Tensor) -> list[float]:
        """Puts a sum into ``.grad``: none where nobody had one. The learning rates to use."""
        start, used = 0, self._ends[-1]
        there = vector[used : used + len(self.parameters)].tolist()
        for parameter, end, some in zip(self.parameters, self._ends, there, strict=True):
            if not some:
                parameter.grad = None
            else:
                part = vector[start:end].view_as(parameter)
                parameter.grad = part.to(parameter.device, parameter.dtype, copy=True)
            start = end
        at = used + len(self.parameters)
        rates = vector[at + 1 :] / vector[at]
        return [float(rate) for rate in rates.tolist()]


def averaged(tensors: Sequence[torch.Tensor], weight: float, group: Any) -> None:
    """Replaces tensors by their weighted mean over ranks, in place.

    Args:
        tensors: floating-point, alike on all ranks.
        weight: of this rank; not 0 on all.
        group: of ranks.
    """
    import torch.distributed as dist

    with torch.no_grad():
        flat = torch.cat([t.detach().reshape(-1).to("cpu", torch.float32) for t in tensors])
        vector = torch.cat([flat * weight, torch.tensor([weight])])
        dist.all_reduce(vector, group=group)
        total = float(vector[-1])
        start = 0
        for tensor in tensors:
            end = start + tensor.numel()
            tensor.copy_((vector[start:end] / total).view_as(tensor))
            start = end
