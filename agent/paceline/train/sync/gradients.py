"""Copies gradients and sums between an optimiser's parameters and one flat vector."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class Gradient:
    """A rank's gradient for one update.

    `vector` has the weighted gradient, followed by other numbers that are summed over ranks; see
    `Flat`. If `arrive` is None, the gradient is in the vector already, and `copied_s` is the
    copying time in seconds. Otherwise `arrive` waits for the copy and returns this time.
    """

    vector: torch.Tensor
    samples: int
    copied_s: float = 0.0
    arrive: Callable[[], float] | None = None


class Flat:
    """Layout of a rank's vector: its gradients, and the numbers that a step with the sum needs.

    The numbers are: for each parameter, 1 if it has a gradient and else 0; a 1, to count the
    contributors; the rank's weight; and the settings of its optimiser. The sum of the ranks'
    vectors gives the summed gradients, the parameters for which any rank has a gradient, the
    contributors' weight, and their mean settings (learning rate, momentum, …). So all replicas
    apply the sum with the same settings, even if their schedules have advanced differently. Vectors
    are on the CPU, in 32 bits. `parameters` have the same order on all ranks.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], optimiser: torch.optim.Optimizer
    ) -> None:
        self.parameters = list(parameters)
        self._ends = torch.tensor([p.numel() for p in self.parameters]).cumsum(0).tolist()
        self._settings = _settings(optimiser)
        # Settings that the optimiser's own steps change, equally on all ranks.
        self._written = set[_Setting]()

    @property
    def length(self) -> int:
        """Return the length of a vector."""
        return int(self._ends[-1]) + len(self.parameters) + 2 + len(self._settings)

    def read(
        self, optimiser: torch.optim.Optimizer, factor: float, weight: float, samples: int
    ) -> Gradient:
        """Return the gradients in ``.grad``, multiplied by `factor`, as one contributor's vector.

        If all gradients are on one GPU, they are copied while the GPU continues to compute. The sum
        of `weight` over all ranks is 1.
        """
        used = self._ends[-1]
        grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        devices = {grad.device for grad in grads}
        beside = len(devices) == 1 and next(iter(devices)).type == "cuda"
        vector = torch.empty(self.length, pin_memory=beside)
        began = time.perf_counter()
        arrive = None
        if beside:
            flat = torch.cat([grad.detach().reshape(-1).to(torch.float32) for grad in grads])
            arrive = _copied(flat.mul_(factor), vector[:used])
        else:
            joined(grads, vector[:used]).mul_(factor)
        copied_s = time.perf_counter() - began
        rest = [float(p.grad is not None) for p in self.parameters]
        rest += [1.0, weight, *(setting.read(optimiser) for setting in self._settings)]
        vector[used:] = torch.tensor(rest)
        return Gradient(vector, samples, copied_s, arrive)

    @contextmanager
    def applying(self, optimiser: torch.optim.Optimizer, vector: torch.Tensor) -> Iterator[None]:
        """Put a round's sum into ``.grad`` and its settings into the optimiser, until exit.

        ``.grad`` is the mean of the contributors' gradients, and learning rates are multiplied by
        the contributors' weight (linear scaling: "Mitigating stragglers in the decentralized
        training on heterogeneous clusters", Sec. 3.3). With plain SGD, this has the same effect as
        a step with the sum. But the steps of Adam, and weight decay, do not depend on the size of
        the gradients: with the full learning rate, they would be as large for a few contributors as
        for all ranks.
        """
        at = self._ends[-1] + len(self.parameters)
        contributors, weight, *sums = vector[at:].tolist()
        rates = [setting for setting in self._settings if setting.name == "lr"]
        scales = weight > 0 and len(rates) == len(optimiser.param_groups)
        if scales:
            vector[: self._ends[-1]] /= weight
        self.write(vector)
        mine = {setting: setting.read(optimiser) for setting in self._settings}
        scaled = dict.fromkeys(rates, weight) if scales else {}
        given = {}
        for setting, total in zip(self._settings, sums, strict=True):
            if setting not in self._written:
                setting.write(optimiser, total / contributors * scaled.get(setting, 1.0))
                # The value is read back, because the optimiser may store it with fewer bits.
                given[setting] = setting.read(optimiser)
        try:
            yield
        finally:
            for setting, value in given.items():
                if setting.read(optimiser) == value:
                    setting.write(optimiser, mine[setting])
                else:
                    self._written.add(setting)

    def write(self, vector: torch.Tensor) -> None:
        """Copy a sum to the parameters' ``.grad``; set None where no rank had a gradient."""
        used = self._ends[-1]
        there = vector[used : used + len(self.parameters)].tolist()
        devices = {parameter.device for parameter in self.parameters}
        # With one device, a single copy moves all gradients.
        if len(devices) == 1:
            vector = vector[:used].to(devices.pop())
        start = 0
        for parameter, end, some in zip(self.parameters, self._ends, there, strict=True):
            part = vector[start:end].view_as(parameter)
            parameter.grad = part.to(parameter.device, parameter.dtype) if some else None
            start = end


def _copied(flat: torch.Tensor, out: torch.Tensor) -> Callable[[], float]:
    """Copy from a GPU into page-locked memory in a separate stream; see `Gradient.arrive`."""
    stream = _stream(flat.device)
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        begun.record()
        out.copy_(flat, non_blocking=True)
        ended.record()
    # `record_stream` keeps the allocator from reusing the memory before the copy is done.
    flat.record_stream(stream)

    def arrive() -> float:
        ended.synchronize()
        return float(begun.elapsed_time(ended)) / 1e3

    return arrive


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Setting:
    """A number that an optimiser's steps depend on and that a schedule may change.

    `group` is the number of the parameter group. `place` is the index in a tuple, such as Adam's
    `betas`; None if the setting is a single number.
    """

    group: int
    name: str
    place: int | None

    def read(self, optimiser: torch.optim.Optimizer) -> float:
        value = optimiser.param_groups[self.group][self.name]
        return float(value if self.place is None else value[self.place])

    def write(self, optimiser: torch.optim.Optimizer, value: float) -> None:
        group = optimiser.param_groups[self.group]
        before = group[self.name]
        if self.place is not None:
            group[self.name] = (*before[: self.place], value, *before[self.place + 1 :])
        elif isinstance(before, torch.Tensor):
            before.fill_(value)
        else:
            group[self.name] = value


def _settings(optimiser: torch.optim.Optimizer) -> list[_Setting]:
    """Return the optimiser's settings.

    Integers are left out, because they are counters or select a variant, except for integer
    learning rates.
    """
    settings = []
    for k, group in enumerate(optimiser.param_groups):
        for name in sorted(group.keys() - {"params"}):
            value = group[name]
            if isinstance(value, tuple):
                settings += [_Setting(k, name, i) for i, x in enumerate(value) if type(x) is float]
            elif isinstance(value, float | torch.Tensor) or (name == "lr" and type(value) is int):
                settings.append(_Setting(k, name, None))
    return settings


def joined(tensors: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Return all values as one float32 vector on the CPU; copy once if they share a device."""
    parts = [t.detach().reshape(-1).to(torch.float32) for t in tensors]
    devices = {part.device for part in parts}
    if len(devices) > 1:
        parts = [part.cpu() for part in parts]
    elif devices == {torch.device("cpu")}:
        return torch.cat(parts, out=out)
    vector = torch.cat(parts).cpu()
    return vector if out is None else out.copy_(vector)


def spread(vector: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copy a vector into tensors, the reverse of `joined`; copy once if they share a device."""
    there, start = vector.to(tensors[0].device), 0
    with torch.no_grad():
        for tensor in tensors:
            end = start + tensor.numel()
            tensor.copy_(there[start:end].view_as(tensor))
            start = end


class Mean:
    """Weighted mean over ranks of floating-point tensors, which are copied at construction.

    `counts` are a few further numbers, which are summed over ranks.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], weight: float, counts: Sequence[float] = ()
    ) -> None:
        flat = joined(tensors)
        self._length = len(flat)
        self._vector = torch.cat([flat * weight, torch.tensor([weight, *counts])])

    def reduce(self, group: Any) -> None:
        """Compute the mean over a group of ranks. Collective."""
        dist.all_reduce(self._vector, group=group)

    @property
    def value(self) -> torch.Tensor | None:
        """Return the mean as a vector; None if all weights are 0."""
        total = float(self._vector[self._length])
        return self._vector[: self._length] / total if total else None

    @property
    def sums(self) -> list[float]:
        """Return the sums of `counts`."""
        return list(map(float, self._vector[self._length + 1 :].tolist()))


def averaged(
    tensors: Sequence[torch.Tensor],
    weight: float,
    group: Any,
    counts: Sequence[float] = (),
    then: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> list[float]:
    """Replace tensors by their weighted mean over ranks, in place; return the sums of `counts`.

    The tensors are floating-point, of equal shapes on all ranks. If all weights are 0, each rank
    keeps its tensors. `then` is a function from the mean, a vector, to the tensors' new values;
    None: the new values are the mean.
    """
    mean = Mean(tensors, weight, counts)
    mean.reduce(group)
    if (value := mean.value) is not None:
        spread(value if then is None else then(value), tensors)
    return mean.sums
