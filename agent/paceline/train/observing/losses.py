"""Observes losses that the script logs to wandb, TensorBoard or MLflow."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from numbers import Real
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from paceline.train.observing.observer import Observer

_OF_TRAINING = re.compile(r"(^|[^a-z])loss($|[^a-z])")
_HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|eval|evaluation|test|dev)($|[^a-z])")


def is_loss(name: str) -> bool:
    """Return whether a metric's name is that of a training loss: ``loss``, ``train/loss``, …"""
    name = name.lower()
    return bool(_OF_TRAINING.search(name)) and not _HELD_OUT.search(name)


def later(observer: Observer) -> dict[str, Callable[[ModuleType], None]]:
    """Return hooks for modules that the script imports later, by the module's name."""

    def writer(module: ModuleType) -> None:
        _watch(observer, module.SummaryWriter, "add_scalar", _named)

    def wandb(module: ModuleType) -> None:
        _watch(observer, module.Run, "log", _mapped)

    def mlflow(module: ModuleType) -> None:
        _watch(observer, module.MlflowClient, "log_metric", _of_run)
        _watch(observer, module.MlflowClient, "log_batch", _listed)

    return {
        "torch.utils.tensorboard.writer": writer,
        "tensorboardX.writer": writer,
        "wandb.sdk.wandb_run": wandb,
        "mlflow.tracking.client": mlflow,
    }


def _watch(
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
        _look(observer, metrics_of, args, kwargs)
        return method(self, *args, **kwargs)

    setattr(kind, name, observed)


def _look(
    observer: Observer, metrics_of: Callable[..., Mapping[str, Any]], args: Any, kwargs: Any
) -> None:
    try:
        metrics = metrics_of(*args, **kwargs)
        training = {str(name): value for name, value in metrics.items() if is_loss(str(name))}
    # The method itself reports errors in its arguments.
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
    # Reading a generator's items here would take them from the method.
    listed = metrics if isinstance(metrics, list | tuple) else ()
    return {each.key: each.value for each in listed}
