"""Recognises models and tensors that torch.distributed has split over ranks."""

from __future__ import annotations

import sys

from torch import nn


def is_dtensor(value: object) -> bool:
    """Return whether a value is a DTensor, which torch.distributed has split over ranks."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_unit(module: nn.Module) -> bool:
    """Return whether `fully_shard` (FSDP2) was called for this module."""
    return _is(module, "torch.distributed.fsdp", "FSDPModule")


def is_sharded(model: nn.Module) -> bool:
    """Return whether `fully_shard` was called for a model or for a part of it."""
    return any(is_unit(module) for module in model.modules())


def is_fsdp1(module: nn.Module) -> bool:
    """Return whether a module is a FullyShardedDataParallel, the predecessor of `fully_shard`."""
    return _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _is(value: object, module: str, name: str) -> bool:
    """Return whether a value has a class, without importing the class's module.

    The import would take a second. If the module was never imported, no value has the class.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
