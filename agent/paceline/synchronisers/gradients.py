"""Between an optimiser's parameters and one flat vector: gradients out, sums in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class Flat:
    """Gradients as a vector, with which of them there are and the optimiser's settings.

    A sum of such vectors tells the summed gradients, of which parameters anyone had a gradient, and
    the contributors' mean settings (learning rate, momentum, …): so all replicas apply it alike,
    wherever their schedules are. On the CPU, in 32 bits.

    Args:
        parameters: that are trained, in the same order on all ranks.
        optimiser: of them.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
    ) -> None:
        self.parameters = list(parameters)
        self._ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        self._settings = len(_settings(optimiser))

    @property
    def length(self) -> int:
        """Of a vector."""
        return int(self._ends[-1]) + len(self.parameters) + 1 + self._settings

    def read(self, optimiser: torch.optim.Optimizer, factor: float) -> torch.Tensor:
        """The vector of what is in ``.grad`` now, times a factor, and of one contributor."""
        used = self._ends[-1]
        vector = torch.empty(self.length)
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        joined(grads, vector[:used]).mul_(factor)
        for k, parameter in enumerate(self.parameters):
            vector[used + k] = parameter.grad is not None
        at = used + len(self.parameters)
        vector[at] = 1
        vector[at + 1 :] = torch.tensor([float(value) for *_, value in _settings(optimiser)])
        return vector

    @contextmanager
    def applying(self, optimiser: torch.optim.Optimizer, vector: torch.Tensor) -> Iterator[None]:
        """Within it a sum is in ``.grad``, and its settings are the optimiser's."""
        self.write(vector)
        at = self._ends[-1] + len(self.parameters)
        mine = _settings(optimiser)
        means = (vector[at + 1 :] / vector[at]).tolist()
        _set(optimiser, [(*where, mean) for (*where, _), mean in zip(mine, means, strict=True)])
        try:
            yield
        finally:
            _set(optimiser, mine)

    def write(self, vector: torch.Tensor) -> None:
        """Puts a sum into ``.grad``, as views of it: none where nobody had one."""
        used = self._ends[-1]
        there = vector[used : used + len(self.parameters)].tolist()
        devices = {parameter.device for parameter in self.parameters}
        if len(devices) == 1:  # one copy
            vector = vector[:used].to(devices.pop())
        start = 0
        for parameter, end, some in zip(self.parameters, self._ends, there, strict=True):
            part = vector[start:end].view_as(parameter)
            parameter.grad = part.to(parameter.device, parameter.dtype) if some else None
            start = end


def _settings(optimiser: torch.optim.Optimizer) -> list[tuple[Any, ...]]:
    """Numbers that steps depend on: parameter group, name, place in a tuple or None, value."""
    found: list[tuple[Any, ...]] = []
    for group in optimiser.param_groups:
        for name in sorted(group.keys() - {"params"}):
            value = group[name]
            if isinstance(value, tuple):
                found += [(group, name, k, one) for k, one in enumerate(value)]
            elif isinstance(value, torch.Tensor):
                found.append((group, name, None, float(value)))  # the tensor itself will change
            elif isinstance(value, int | float) and not isinstance(value, bool):
                found.append((group, name, None, value))
    return found


def _set(optimiser: torch.optim.Optimizer, settings: list[tuple[Any, ...]]) -> None:
    for group, name, place, value in settings:
        before = group[name]
        if place is not None:
            group[name] = (*before[:place], value, *before[place + 1 :])
        elif isinstance(before, torch.Tensor):
            before.fill_(value)
        else:
            group[name] = value


def joined(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """All values as one vector, on the CPU in 32 bits; from one device by one copy.

    Args:
        tensors: of one device or several.
        out: where the vector shall be; None: in a new one.
    """
    parts = [t.detach().reshape(-1).to(torch.float32) for t in tensors]
    devices = {part.device for part in parts}
    if len(devices) > 1:
        parts = [part.cpu() for part in parts]
    elif devices == {torch.device("cpu")}:
        return torch.cat(parts, out=out)
    vector = torch.cat(parts).cpu()
    return vector if out is None else out.copy_(vector)


def spread(vector: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Puts a vector into the tensors that `joined` would make it of; to one device by one copy."""
    there, start = vector.to(tensors[0].device), 0
    with torch.no_grad():
        for tensor in tensors:
            end = start + tensor.numel()
            tensor.copy_(there[start:end].view_as(tensor))
            start = end


def averaged(
    tensors: Sequence[torch.Tensor], weight: float, group: Any, told: Sequence[float] = ()
) -> list[float]:
    """Replaces tensors by their weighted mean over ranks, in place.

    Args:
        tensors: floating-point, alike on all ranks.
        weight: of this rank; all 0: each keeps its own.
        group: of ranks.
        told: a few numbers, to be summed over ranks.

    Returns:
        the sums of `told`.
    """
    flat = joined(tensors)
    vector = torch.cat([flat * weight, torch.tensor([weight, *told])])
    dist.all_reduce(vector, group=group)
    if total := float(vector[len(flat)]):
        spread(vector[: len(flat)] / total, tensors)
    return [float(one) for one in vector[len(flat) + 1 :].tolist()]
