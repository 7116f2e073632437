"""A sharded model with weighted gradients, correct for uneven and for empty local batches."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.train import ddp
from paceline.train.ddp import CurrentStep, SingleProcess, WeightedDDP
from paceline.train.fillers import uncounted
from paceline.train.fsdp.kinds import is_unit
from paceline.train.fsdp.units import refuse, units
from paceline.train.fsdp.waits import FsdpWaits

_PROFILE = (
    "session.profile: ranks of a sharded model gather parameters from each other in each pass, so "
    "no rank can run trial batches alone: do not call it; give Session(limits=…) if memory is short"
)

# Sharded models wrapped by sessions that are still open.
_wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class WeightedFSDP(nn.Module):
    """A session's representation of a sharded model; the script continues to use the model itself.

    FSDP computes with unsharded parameters. It creates these tensors at the first gather, and fills
    the same tensors at each later gather. The gradient of an unsharded parameter is weighted as
    soon as autograd has computed it, before FSDP reduces it or adds it to a gradient from an
    earlier pass. So gradients that accumulate are weighted with the weights of their own steps, and
    FSDP's mean over ranks is the mean over the global batch.
    """

    static_graph = False

    def __init__(self, module: nn.Module, current: CurrentStep) -> None:
        super().__init__()
        self.module = module
        self._current = current
        self._units: list[Any] = [part for part in module.modules() if is_unit(part)]
        # The unsharded parameters whose gradients are weighted, by `id`.
        self._weighed: dict[int, nn.Parameter] = {}
        # For each sharded parameter: True if it required a gradient at the last check.
        self._trained: list[bool] = []
        self._handles: list[RemovableHandle] = FsdpWaits(current).watch(self._units)
        # Context in which the forward pass of a filler does not change the model's buffers.
        self._uncounted = ExitStack()
        self._handles += [
            module.register_forward_pre_hook(self._forward_begins),
            module.register_forward_hook(self._forward_ends, always_call=True),
        ]
        _wrapped.add(module)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the sharded parameters, which the optimiser steps, even while FSDP gathers them."""
        for unit in units(self.module):
            yield from unit.parameters

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_begins(self, *_: Any) -> None:
        if self._current.filler and torch.is_grad_enabled():
            self._uncounted.close()
            self._uncounted.enter_context(uncounted(self.module, self._current))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_ends(self, *_: Any) -> None:
        self._uncounted.close()

    def begin(self) -> None:
        """Prepare a step, so that each gradient is weighted. Collective.

        Raise a ValueError if the script has changed the model so that `refuse` rejects it.
        """
        trained = [parameter.requires_grad for parameter in self.parameters()]
        if trained == self._trained:
            return
        self._trained = trained
        group = self._current.group
        refuse(self.module, None if group is None else dist.get_process_group_ranks(group))
        # Skip parameters that are still sharded: they belong to another unit, which registers
        # their hook.
        sharded = {id(parameter) for parameter in self.parameters()}
        for unit in self._units:
            unit.unshard()
            for parameter in unit.parameters():
                if id(parameter) not in sharded:
                    self._weigh(parameter)
            unit.reshard()

    def _weigh(self, parameter: nn.Parameter) -> None:
        if not parameter.requires_grad or id(parameter) in self._weighed:
            return
        self._weighed[id(parameter)] = parameter
        self._handles.append(parameter.register_hook(self._current.weighed))  # type: ignore[no-untyped-call]

    def reduce(self, reduces: bool) -> None:
        """Do nothing: for a sharded model, the script decides which passes reduce gradients."""

    def unreduced(self) -> Any:
        """Raise a ValueError: a rank cannot run a pass of a sharded model without other ranks."""
        raise ValueError(_PROFILE)

    def close(self) -> None:
        """Restore the model after the session's end, so that another session may wrap it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._weighed.clear()
        self._trained = []
        _wrapped.discard(self.module)


Wrapped = WeightedDDP | SingleProcess | WeightedFSDP


def wrap(model: nn.Module, current: CurrentStep, options: dict[str, Any]) -> Wrapped:
    """Wrap a model that `refuse_model` has accepted; DistributedDataParallel gets the `options`."""
    if is_unit(model):
        return WeightedFSDP(model, current)
    return ddp.wrap(model, current, options)


def device_of(model: Wrapped) -> torch.device | None:
    """Return the device on which a model computes; None if it has no parameters.

    The parameters of a sharded model may be on the CPU.
    """
    if isinstance(model, WeightedFSDP):
        return next((unit.device for unit in units(model.module)), None)
    return next((parameter.device for parameter in model.parameters()), None)


def is_sharded(model: Wrapped) -> bool:
    """Return whether a wrapped model is sharded."""
    return isinstance(model, WeightedFSDP)


def is_wrapped(model: nn.Module) -> bool:
    """Return whether an open session has wrapped this sharded model."""
    return model in _wrapped


def close(models: Iterable[Wrapped]) -> None:
    """Restore the models after the session's end; see `WeightedFSDP.close`."""
    for model in models:
        if isinstance(model, WeightedFSDP):
            model.close()
