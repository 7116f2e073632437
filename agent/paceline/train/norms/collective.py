"""BatchNorm over a whole global batch: forward and backward pass.

Each rank's loss L_j is the mean over its own batch, and `paceline.train.ddp` multiplies its
gradients by w_j where they arrive at the parameters. So the gradient that reaches this layer is
that of L_j, and the gradient of L = Σ w_j L_j is w_j times that. The sums over all ranks need the
latter::

    Σ_j w_j Σ_i g_ji    and    Σ_j w_j Σ_i g_ji x̂_ji

The gradient that the layer passes on is divided by w_j, because it is multiplied by w_j later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from paceline.train.ddp import CurrentStep
from paceline.train.timing import RunningStep


@dataclass(frozen=True)
class Shared:
    """Statistics of a global batch, by channel, [C].

    `var` is the biased variance, by which values are normalised. `count` is the number of values
    per channel, one number.
    """

    mean: Tensor
    var: Tensor
    count: Tensor


@dataclass(frozen=True)
class Exchange:
    """All-reduces over the ranks, within the step whose forward pass created it."""

    current: CurrentStep
    running: RunningStep

    @property
    def weight(self) -> float:
        """Return w_j, the weight of this rank's mean gradient in the update; 0 for a filler."""
        return self.running.step.weight if self.running.step.samples else 0.0

    def add_up(self, values: Tensor) -> None:
        """Replace values by their sums over all ranks. The wait does not count as computing."""
        with self.running.meeting(), self.current.own_collective():
            dist.all_reduce(values, group=self.current.group)


def shared(values: Tensor, exchange: Exchange) -> Shared:
    """Return the statistics of all ranks' values, [n, C, …], without those of fillers.

    Sums are taken in float64: a variance is the small difference of two large ones.
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
    # Its dtype sets the precision of the results.
    unused = torch.zeros(values.size(1), dtype=kept, device=values.device)
    # Three to ten times as fast on the CPU as torch.var_mean.
    mean, var = torch.batch_norm_update_stats(values, unused, unused.clone(), 0.0)
    return mean, var


class Normalised(torch.autograd.Function):
    """Values normalised by shared statistics: ``γ · x̂ + β``, [n, C, …]."""

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
        """Return gradients that include the sums over all ranks."""
        values, weight, mean, var, count = ctx.saved_tensors
        goes_back = ctx.needs_input_grad[0]
        scale = torch.rsqrt(var + ctx.eps)
        wanted = [goes_back, True, True]
        # As if the statistics were constants: γ g / σ, Σ g x̂ and Σ g of this rank.
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
        # The answer is the same on all ranks, so none waits in an all-reduce.
        if not goes_back:
            return None, *_given(weight, of_weight, of_bias), None, None, None
        share = ctx.exchange.weight
        sums = torch.stack([of_bias, of_weight]).to(mean.dtype)
        # A filler contributes zeros, not a product: 0 · NaN is NaN.
        sums = sums * share if share else torch.zeros_like(sums)
        ctx.exchange.add_up(sums)
        # A filler's gradients are part of no sum.
        if not share:
            return torch.zeros_like(back), *_given(weight, of_weight, of_bias), None, None, None
        plain, by_value = sums / (share * count).to(sums.dtype)
        factor = scale if weight is None else scale * weight
        slope = -factor * scale * by_value
        offset = -factor * plain - slope * mean
        shape = (1, -1) + (1,) * (values.dim() - 2)
        # In place, because a new tensor of this size takes as long as the arithmetic.
        if back.dtype == slope.dtype:
            whole = back.addcmul_(values, slope.view(shape)).add_(offset.view(shape))
        else:
            whole = torch.addcmul(offset.view(shape), values, slope.view(shape)).add_(back)
        return whole.to(values.dtype), *_given(weight, of_weight, of_bias), None, None, None


def _given(weight: Tensor | None, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    """Cast gradients of the affine parameters to the parameters' precision."""
    if weight is None:
        return tuple(None for _ in gradients)
    return tuple(gradient.to(weight.dtype) for gradient in gradients)
