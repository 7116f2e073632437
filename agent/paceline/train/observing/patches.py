"""Patches PyTorch, wandb, TensorBoard and MLflow, so that they report events to the observer.

The module uses some private names of PyTorch, which begin with an underscore; a test fails if a
version of torch lacks one of them. If a name is missing, the script still trains, but some or all
of its events are not observed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import dataloader

if TYPE_CHECKING:
    from paceline.train.observing.observer import Observer

_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
_OF_TRAINING = re.compile(r"(^|[^a-z])loss($|[^a-z])")
_HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|eval|evaluation|test|dev)($|[^a-z])")


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
    return {_FSDP: lambda module: _watch_shards(observer, module), **loss_hooks(observer)}


def _watch_models(observer: Observer) -> None:
    wrapper: Any = DistributedDataParallel
    make, forward = wrapper.__init__, wrapper.forward

    @wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        make(self, *args, **kwargs)
        observer.wrapped(self)

    @wraps(forward)
    def observed_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        # torch.compile must not trace the observer: only the forward pass itself is compiled.
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
    """Observe FSDP2: patch the methods that wait for other ranks, or make the device wait.

    Raises:
        AttributeError: this release of torch lacks one of the methods. Then nothing is patched.
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


def is_loss(name: str) -> bool:
    """Return whether a metric's name is usual for a training loss: ``loss``, ``train/loss``, …"""
    name = name.lower()
    return bool(_OF_TRAINING.search(name)) and not _HELD_OUT.search(name)


def loss_hooks(observer: Observer) -> dict[str, Callable[[ModuleType], None]]:
    """Return hooks for modules that log a script's losses, by the module's name."""

    def writer(module: ModuleType) -> None:
        _watch_logger(observer, module.SummaryWriter, "add_scalar", _named)

    def wandb(module: ModuleType) -> None:
        _watch_logger(observer, module.Run, "log", _mapped)

    def mlflow(module: ModuleType) -> None:
        _watch_logger(observer, module.MlflowClient, "log_metric", _of_run)
        _watch_logger(observer, module.MlflowClient, "log_batch", _listed)

    return {
        "torch.utils.tensorboard.writer": writer,
        "tensorboardX.writer": writer,
        "wandb.sdk.wandb_run": wandb,
        "mlflow.tracking.client": mlflow,
    }


def _watch_logger(
    observer: Observer,
    kind: Any,
    name: str,
    metrics_of: Callable[..., Mapping[str, Any]],
) -> None:
    method = getattr(kind, name, None)
    if method is None:
        return

    @wraps(method)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        _observe_losses(observer, metrics_of, args, kwargs)
        return method(self, *args, **kwargs)

    setattr(kind, name, observed)


def _observe_losses(
    observer: Observer, metrics_of: Callable[..., Mapping[str, Any]], args: Any, kwargs: Any
) -> None:
    try:
        metrics = metrics_of(*args, **kwargs)
        training = {str(name): value for name, value in metrics.items() if is_loss(str(name))}
    # If the arguments are wrong, the logger's own method reports that to the script.
    except Exception:
        return
    for name, value in training.items():
        if isinstance(value, Real) or (isinstance(value, torch.Tensor) and not value.ndim):
            observer.logged(name, value)


def _named(tag: str, scalar_value: Any, *_: Any, **__: Any) -> Mapping[str, Any]:
    return {tag: scalar_value}


def _mapped(data: Any, *_: Any, **__: Any) -> Mapping[str, Any]:
    return data if isinstance(data, Mapping) else {}


def _of_run(run_id: str, key: str, value: Any, *_: Any, **__: Any) -> Mapping[str, Any]:
    return {key: value}


def _listed(run_id: str, metrics: Any = (), *_: Any, **__: Any) -> Mapping[str, Any]:
    # Reading the items of a generator here would consume them before the logger's method.
    listed = metrics if isinstance(metrics, list | tuple) else ()
    return {each.key: each.value for each in listed}
