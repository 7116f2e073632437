"""Averages of running statistics over the ranks, for layers that normalise by the local batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.train.ddp import CurrentStep
from paceline.train.fsdp.model import Wrapped
from paceline.train.norms.layers import LocalBatchNorm
from paceline.train.parts import Step


class RunningStatistics:
    """Running statistics of local BatchNorm layers, which become their mean over the ranks.

    The mean weighs each rank by the samples that it has trained since the previous mean. The
    session appends to `models` after construction.
    """

    def __init__(self, current: CurrentStep, models: Sequence[Wrapped]) -> None:
        self._current, self._models = current, models
        # Samples that this rank has trained since the last mean.
        self._samples = 0

    def trained(self, step: Step) -> None:
        """Count the samples of a step that this rank has trained."""
        self._samples += step.samples

    @property
    def differ(self) -> bool:
        """Return whether ranks can have different running statistics."""
        return self._current.world > 1 and bool(self._local())

    def _local(self) -> list[LocalBatchNorm]:
        return [layer for layer in self._layers() if isinstance(layer, LocalBatchNorm)]

    def agree(self) -> None:
        """Average the statistics. Collective: all ranks call it after the same step."""
        samples, self._samples = self._samples, 0
        if not self.differ:
            return
        layers = self._local()
        group = self._current.group
        counts = [n for layer in layers if (n := layer.num_batches_tracked) is not None]
        _count_alike(counts, group)
        _average(list(_tracked(layers)), samples, group)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the running statistics on exit, so that a trial pass leaves them unchanged."""
        buffers = [buffer for layer in self._layers() for buffer in layer.buffers(recurse=False)]
        before = [buffer.clone() for buffer in buffers]
        try:
            yield
        finally:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    def _layers(self) -> list[_BatchNorm]:
        modules: list[nn.Module] = [m for model in self._models for m in model.module.modules()]
        return [module for module in modules if isinstance(module, _BatchNorm)]


def _tracked(layers: Sequence[LocalBatchNorm]) -> Iterator[Tensor]:
    for layer in layers:
        if layer.running_mean is not None and layer.running_var is not None:
            yield from (layer.running_mean, layer.running_var)


def _count_alike(counts: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Set each number of batches to the largest of all ranks."""
    if not counts:
        return
    most = torch.stack([count.to(counts[0].device) for count in counts])
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    for count, value in zip(counts, most, strict=True):
        count.copy_(value)


def _average(tensors: list[Tensor], samples: int, group: dist.ProcessGroup | None) -> None:
    """Replace tensors by their means over the ranks, weighted by each rank's samples."""
    if not tensors:
        return
    device = tensors[0].device
    vector = torch.cat([tensor.flatten().to(device, torch.float64) for tensor in tensors])
    # A rank without samples contributes zeros, not a product: 0 · NaN is NaN.
    vector = vector * samples if samples else torch.zeros_like(vector)
    vector = torch.cat([vector, vector.new_tensor([samples])])
    dist.all_reduce(vector, group=group)
    if vector[-1] == 0:
        return
    means = torch.split(vector[:-1] / vector[-1], [tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))
