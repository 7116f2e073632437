"""BatchNorm layers that use the session's current step, such as the rank's weight in it.

A layer stays the same object, with its parameters, buffers and hooks: only its class changes.
Copies and pickles of the layer have its original class.
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from paceline.train.ddp import CurrentStep
from paceline.train.norms.collective import Exchange, Normalised, shared

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
    """A BatchNorm layer of a wrapped model."""

    # See `paceline.train.fillers`.
    leaves_fillers_out: ClassVar[bool] = True

    _original: ClassVar[type[_BatchNorm]]
    _current: CurrentStep

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "_current"}
        # The process that reads the pickle need not have this package.
        return copyreg._reconstructor, (self._original, object, None), state  # type: ignore[attr-defined]


class Synchronised(Adapted):
    """A layer that normalises by the global batch, as a single process with that batch would.

    All ranks call it equally often in a step. Outside of the loop over the loader, and with a
    single rank, it is a plain BatchNorm.
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
            # On a GPU the comparison would wait for the device.
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

    A filler, or a batch with one value per channel, has no statistics. The layer normalises it by
    the running statistics and does not update them.
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
            # torch raises its own error here.
            return super().forward(values)
        mean = torch.zeros(values.size(1), device=values.device)
        return functional.batch_norm(
            values, mean, torch.ones_like(mean), self.weight, self.bias, eps=self.eps
        )


def adapt(model: nn.Module, how: str, current: CurrentStep) -> None:
    """Change in place the BatchNorm layers of a model that `refuse_model` has accepted.

    `how` is "sync" or "local". SyncBatchNorm layers are synchronised in any case.
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
    """Return a layer's class from before this or another session adapted the layer."""
    return layer._original if isinstance(layer, Adapted) else type(layer)


_kinds: dict[tuple[type, type], type[Adapted]] = {}


def _adapted(original: type[_BatchNorm], how: type[Adapted]) -> type[Adapted]:
    """Return a subclass of `original` with the forward pass of `how`, one class per pair."""
    if (original, how) not in _kinds:
        # DistributedDataParallel refuses every subclass of SyncBatchNorm on the CPU.
        base = _AnyDimension if issubclass(original, nn.SyncBatchNorm) else original
        name = f"{how.__name__}{original.__name__}"
        _kinds[original, how] = type(name, (how, base), {"_original": original})
    return _kinds[original, how]


class _AnyDimension(_BatchNorm):
    """Replacement for SyncBatchNorm as a base class, without its communication."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


def shares_statistics(model: nn.Module, batchnorm: str | None = None) -> bool:
    """Return whether ranks wait for each other in this model's forward pass.

    The model may still have to be adapted, with `batchnorm`: "sync" makes every layer wait.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    return any(batchnorm == "sync" or is_shared(layer) for layer in layers)


def is_shared(layer: _BatchNorm) -> bool:
    """Return whether a layer uses the statistics of all ranks."""
    return isinstance(layer, Synchronised | nn.SyncBatchNorm)


def refusal(layer: nn.Module, batchnorm: str | None) -> str | None:
    """Return why a layer cannot be synchronised, in words that follow its name; None if it can."""
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
