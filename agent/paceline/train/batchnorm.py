"""BatchNorm for wrapped models, whose local batches are uneven and sometimes empty.

`adapt` changes a model's layers in place: a layer stays the same object, with its parameters,
buffers and hooks, and only its class changes. `Synchronised` layers normalise by the whole global
batch, `LocalBatchNorm` layers by each rank's own batch. `Session.wrap` calls `adapt`, and the
training loop calls `agree`::

    adapt(model, "sync", current)  # before DistributedDataParallel sees the model
    statistics = RunningStatistics(current, models)
    statistics.agree()  # on all ranks, after the same step

**Normalising by the global batch.** The loss L_j of rank j is the mean over its own batch, and w_j
is the rank's weight in the update. `paceline.train.ddp` multiplies gradients by w_j only when they
arrive at the parameters. So in the backward pass a layer gets the gradient of L_j. The gradient of
the global loss L = Σ_j w_j L_j would be w_j times as large. The layer therefore computes these sums
over all ranks, where x̂_ji is the normalised value i of rank j, and g_ji the gradient that the
layer gets for this value::

    Σ_j w_j Σ_i g_ji    and    Σ_j w_j Σ_i g_ji x̂_ji

The gradient of L for the layer's input follows from these sums and g_ji. The layer divides that
gradient by w_j before it passes the gradient on, because `ddp` multiplies by w_j later.
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.train.ddp import CurrentStep
from paceline.train.fsdp.model import Wrapped
from paceline.train.timing import RunningStep

_REFUSED_CLASS = (
    "is a {kind}, a BatchNorm with its own forward pass, which Paceline cannot synchronise: use "
    "nn.BatchNorm1d, 2d or 3d followed by a separate layer, or accept each rank's own statistics "
    "with wrap(model, batchnorm='local')"
)
_REFUSED_GROUP = (
    "is a SyncBatchNorm with its own process group, but Paceline synchronises over all ranks: "
    "leave process_group out"
)


class Adapted(_BatchNorm):
    """A BatchNorm layer of a wrapped model, whose class `adapt` has changed."""

    # If True, `fillers.uncounted` need not restore the layer's buffers after a filler.
    leaves_fillers_out: ClassVar[bool] = True

    _original: ClassVar[type[_BatchNorm]]
    _current: CurrentStep

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "_current"}
        # Pickle the original class, because the process that unpickles may not have this package.
        return copyreg._reconstructor, (self._original, object, None), state  # type: ignore[attr-defined]


class Synchronised(Adapted):
    """A layer that normalises by the global batch, as a single process with that batch would.

    All ranks must call the layer equally often in a step. Outside of the loop over the loader, and
    with a single rank, the layer works as a plain BatchNorm.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """See `torch.nn.BatchNorm1d`."""
        if not self.training or self._current.world == 1 or self._current.running is None:
            return _BatchNorm.forward(self, input)
        out: Tensor = self._synchronised(input)
        return out

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _synchronised(self, values: Tensor) -> Tensor:
        self._check_input_dim(values)  # type: ignore[no-untyped-call]
        running = self._current.running
        assert running is not None
        exchange = Exchange(self._current, running)
        with torch.no_grad():
            by = shared(values.detach(), exchange)
            # Check the count only on a CPU, because reading it from a GPU would wait for the GPU.
            if values.device.type == "cpu" and by.count == 1:
                raise ValueError(
                    "Expected more than 1 value per channel when training, got a global batch of "
                    f"one sample, of shape {tuple(values.shape)}"
                )
            self._keep(by.mean, by.var * (by.count / (by.count - 1).clamp_min(1)))
        out: Tensor = Normalised.apply(values, self.weight, self.bias, by, self.eps, exchange)  # type: ignore[no-untyped-call]
        return out

    def _keep(self, mean: Tensor, var: Tensor) -> None:
        if not self.track_running_stats or self.running_mean is None or self.running_var is None:
            return
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        for kept, new in ((self.running_mean, mean), (self.running_var, var)):
            kept.lerp_(new.to(kept.dtype), momentum or 0.0)


class LocalBatchNorm(Adapted):
    """A layer that normalises by this rank's own batch, as under DistributedDataParallel.

    A filler, or a batch with one value per channel, cannot give statistics. The layer normalises
    such a batch by the running statistics and does not update them.
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """See `torch.nn.BatchNorm1d`."""
        if not self.training or not (self._current.filler or input.numel() == input.size(1)):
            return super().forward(input)
        if self.running_mean is None:
            return self._without_statistics(input)
        self.training = False
        try:
            return super().forward(input)
        finally:
            self.training = True

    def _without_statistics(self, values: Tensor) -> Tensor:
        if not self._current.filler:
            # The batch has one value per channel, for which torch raises its own error.
            return super().forward(values)
        mean = torch.zeros(values.size(1), device=values.device)
        return functional.batch_norm(
            values, mean, torch.ones_like(mean), self.weight, self.bias, eps=self.eps
        )


def adapt(model: nn.Module, how: str, current: CurrentStep) -> None:
    """Change in place the BatchNorm layers of a model that `refuse_model` has accepted.

    `how` is "sync" or "local". SyncBatchNorm layers are synchronised with either value.
    """
    for layer in model.modules():
        if not isinstance(layer, _BatchNorm):
            continue
        original = _original(layer)
        whole = how == "sync" or issubclass(original, nn.SyncBatchNorm)
        kind = _adapted(original, Synchronised if whole else LocalBatchNorm)
        layer.__class__ = kind
        vars(layer)["_current"] = current


def _original(layer: _BatchNorm) -> type[_BatchNorm]:
    return layer._original if isinstance(layer, Adapted) else type(layer)


_kinds: dict[tuple[type, type], type[Adapted]] = {}


def _adapted(original: type[_BatchNorm], how: type[Adapted]) -> type[Adapted]:
    """Return a subclass of `original` with the forward pass of `how`."""
    if (original, how) not in _kinds:
        # DistributedDataParallel refuses every subclass of SyncBatchNorm on the CPU, so the new
        # class has another base class.
        base = _AnyDimension if issubclass(original, nn.SyncBatchNorm) else original
        name = f"{how.__name__}{original.__name__}"
        _kinds[original, how] = type(name, (how, base), {"_original": original})
    return _kinds[original, how]


class _AnyDimension(_BatchNorm):
    """Base class in place of SyncBatchNorm; like it, accepts inputs of two or more dimensions."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def shares_statistics(model: nn.Module, batchnorm: str | None = None) -> bool:
    """Return whether BatchNorm makes ranks wait for each other in this model's forward pass.

    The model need not be adapted yet: `batchnorm` is the value that `adapt` will get as `how`.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return any(batchnorm == "sync" or is_shared(layer) for layer in layers)


def is_shared(layer: _BatchNorm) -> bool:
    """Return whether a layer uses the statistics of all ranks."""
    return isinstance(layer, Synchronised | nn.SyncBatchNorm)


def refusal(layer: nn.Module, batchnorm: str | None) -> str | None:
    """Return why a layer cannot be synchronised, worded to follow the layer's name.

    Return None if the layer can be synchronised, or need not be with this `batchnorm`.
    """
    if not isinstance(layer, _BatchNorm):
        return None
    original = _original(layer)
    if issubclass(original, nn.SyncBatchNorm):
        group: Any = layer.process_group
        if group is not None and dist.get_world_size(group) != dist.get_world_size():
            return _REFUSED_GROUP
    elif batchnorm != "sync":
        return None
    plain = (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return None if original.forward in plain else _REFUSED_CLASS.format(kind=original.__name__)


@dataclass(frozen=True)
class Shared:
    """Statistics of a global batch for each of C channels, [C].

    `var` is the biased variance, by which values are normalised. `count` is the number of values
    per channel, a tensor with one element.
    """

    mean: Tensor
    var: Tensor
    count: Tensor


@dataclass(frozen=True)
class Exchange:
    """Adds up values of one layer over the ranks, in a step's forward and backward pass."""

    current: CurrentStep
    running: RunningStep

    @property
    def weight(self) -> float:
        """Return w_j, the weight of this rank's mean gradient in the update; 0 for a filler."""
        return self.running.step.weight if self.running.step.samples else 0.0

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sums over all ranks; the reduction's time counts as waiting."""
        with self.running.in_collective(), self.current.own_collective():
            dist.all_reduce(values, group=self.current.group)


def shared(values: Tensor, exchange: Exchange) -> Shared:
    """Return the statistics of all ranks' `values`, [n, C, …]; fillers are left out.

    Sums are in float64, because the variance is the difference of two nearly equal numbers.
    """
    channels = values.size(1)
    sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=values.device)
    if exchange.weight:
        mean, var = (part.double() for part in _own(values))
        own = values.numel() // channels
        sums[:channels] = own * mean
        sums[channels:-1] = own * (var + mean.square())
        sums[-1] = own
    exchange.add_up(sums)
    count = sums[-1]
    mean, square = (sums[:-1] / count).view(2, channels)
    var = (square - mean.square()).clamp_min_(0)
    kept = torch.promote_types(values.dtype, torch.float32)
    return Shared(mean.to(kept), var.to(kept), count)


def _own(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance of one rank's values, [C] each, in float32 at least."""
    kept = torch.promote_types(values.dtype, torch.float32)
    # The dtype of `unused` sets the precision of the mean and of the variance.
    unused = torch.zeros(values.size(1), dtype=kept, device=values.device)
    # On the CPU `batch_norm_update_stats` is three to ten times as fast as `var_mean`.
    mean, var = torch.batch_norm_update_stats(values, unused, unused.clone(), 0.0)
    return mean, var


class Normalised(torch.autograd.Function):
    """Autograd function that normalises values by all ranks' statistics.

    It returns γ · x̂ + β, [n, C, …], where x̂ are the normalised values, γ is the layer's weight and
    β its bias.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        by: Shared,
        eps: float,
        exchange: Exchange,
    ) -> Tensor:
        """Normalise by statistics that are already reduced, without communication."""
        ctx.save_for_backward(values, weight, by.mean, by.var, by.count)
        ctx.eps, ctx.exchange = eps, exchange
        out, _, _ = torch.native_batch_norm(
            values, weight, bias, by.mean, by.var, training=False, momentum=0.0, eps=eps
        )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return gradients that include the effect of the values on all ranks' statistics."""
        values, weight, mean, var, count = ctx.saved_tensors
        of_input = ctx.needs_input_grad[0]
        scale = torch.rsqrt(var + ctx.eps)
        wanted = [of_input, True, True]
        # Gradients of input, weight and bias as if the statistics were constants: γ g / σ, and
        # this rank's Σ g x̂ and Σ g, where g is `gradient` and σ the standard deviation.
        back, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient,
            values,
            weight,
            mean,
            var,
            mean,
            scale,
            False,
            ctx.eps,
            wanted,
        )
        # Whether the input needs a gradient is the same on all ranks, so either all ranks call the
        # all-reduce below or none.
        if not of_input:
            return None, *_cast(weight, of_weight, of_bias), None, None, None
        rank_weight = ctx.exchange.weight
        sums = torch.stack([of_bias, of_weight]).to(mean.dtype)
        # Do not multiply a filler's sums by 0, because 0 · NaN is NaN.
        sums = sums * rank_weight if rank_weight else torch.zeros_like(sums)
        ctx.exchange.add_up(sums)
        # A filler was left out of the statistics, so the gradient of its values is 0.
        if not rank_weight:
            return torch.zeros_like(back), *_cast(weight, of_weight, of_bias), None, None, None
        plain, by_value = sums / (rank_weight * count).to(sums.dtype)
        factor = scale if weight is None else scale * weight
        slope = -factor * scale * by_value
        offset = -factor * plain - slope * mean
        shape = (1, -1) + (1,) * (values.dim() - 2)
        # Compute in place: allocating another tensor of this size would double the time.
        if back.dtype == slope.dtype:
            whole = back.addcmul_(values, slope.view(shape)).add_(offset.view(shape))
        else:
            whole = torch.addcmul(offset.view(shape), values, slope.view(shape)).add_(back)
        return whole.to(values.dtype), *_cast(weight, of_weight, of_bias), None, None, None


def _cast(weight: Tensor | None, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    if weight is None:
        return tuple(None for _ in gradients)
    return tuple(gradient.to(weight.dtype) for gradient in gradients)


class RunningStatistics:
    """Average of the running statistics of local BatchNorm layers over the ranks.

    Each rank's weight is the number of samples that it has trained since the last average. The
    session appends to `models` after construction.
    """

    def __init__(self, current: CurrentStep, models: Sequence[Wrapped]) -> None:
        self._current, self._models = current, models
        # The loop adds the samples of each iteration.
        self.samples = 0

    @property
    def differ(self) -> bool:
        """Return whether the running statistics can differ between ranks."""
        return self._current.world > 1 and bool(self._local())

    def _local(self) -> list[LocalBatchNorm]:
        return [layer for layer in self._layers() if isinstance(layer, LocalBatchNorm)]

    def agree(self) -> None:
        """Average the statistics over the ranks. All ranks call this after the same step."""
        samples, self.samples = self.samples, 0
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
    """Set each layer's count of batches to the largest count of all ranks."""
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
    # Do not multiply by 0, because 0 · NaN is NaN.
    vector = vector * samples if samples else torch.zeros_like(vector)
    vector = torch.cat([vector, vector.new_tensor([samples])])
    dist.all_reduce(vector, group=group)
    if vector[-1] == 0:
        return
    means = torch.split(vector[:-1] / vector[-1], [tensor.numel() for tensor in tensors])
    for tensor, mean in zip(tensors, means, strict=True):
        tensor.copy_(mean.view_as(tensor))
