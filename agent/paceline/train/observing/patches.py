"""Patches of PyTorch that report a script's training events to the observer.

Names that begin with an underscore are private to PyTorch; a test fails if a version of torch has
lost one. Without them the script still trains, and less of it is observed, or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

if TYPE_CHECKING:
    from paceline.train.observing.observer import Observer

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def apply(observer: Observer) -> None:
    """Observe DistributedDataParallel, loaders and optimisers."""
    _watch_models(observer)
    _watch_loaders(observer)

    def stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        # A compiler that traces an optimiser's step would trace the observer, too.
        if not torch.compiler.is_compiling():
            observer.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)


def later(observer: Observer) -> dict[str, Callable[[ModuleType], None]]:
    """Return hooks for modules that the script imports later, by the module's name."""
    return {_FSDP: lambda module: _watch_shards(observer, module)}


def _watch_models(observer: Observer) -> None:
    wrapper: Any = DistributedDataParallel
    make, forward = wrapper.__init__, wrapper.forward

    @wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        observer.wrapped(self)

    @wraps(forward)
    def observed_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        # Under torch.compile, only the forward pass itself is compiled.
        if not torch.compiler.is_compiling():
            observer.entered(self, (inputs, kwargs))
        return forward(self, *inputs, **kwargs)

    wrapper.__init__, wrapper.forward = __init__, observed_forward


def _watch_loaders(observer: Observer) -> None:
    iterators = dataloader._BaseDataLoaderIter
    following = iterators.__next__

    @wraps(following)
    def __next__(self: Any) -> Any:  # noqa: N807
        began = time.perf_counter()
        with observer.loading():
            batch = following(self)
        observer.loaded(self, batch, time.perf_counter() - began)
        return batch

    iterators.__next__ = __next__  # type: ignore[method-assign]


def _watch_shards(observer: Observer, module: Any) -> None:
    """Observe FSDP2: each of these methods waits for other ranks, or makes the device wait.

    Raises:
        AttributeError: this release of torch has lost a name. Nothing is patched then.
    """
    group = module.FSDPParamGroup
    names = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")
    backward = module.TrainingState.PRE_BACKWARD
    make, methods = group.__init__, [getattr(group, name) for name in names]

    @wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        observer.sharded(self)

    group.__init__ = __init__
    for name, method in zip(names, methods, strict=True):
        setattr(group, name, _waiting(observer, method, backward))


def _waiting(observer: Observer, method: Any, backward: Any) -> Any:
    gathers = method.__name__ in ("unshard", "wait_for_unshard")

    @wraps(method)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        in_backward = self._training_state == backward
        held_out = gathers and not torch.is_grad_enabled() and not in_backward
        if held_out or torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        if method.__name__ == "post_backward":
            observer.sharded_backward_began()
        observer.waits()
        try:
            return method(self, *args, **kwargs)
        finally:
            observer.waited()

    return observed
