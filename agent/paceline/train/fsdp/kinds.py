"""What torch.distributed has split over ranks: models, and tensors."""

from __future__ import annotations

import sys

from torch import nn


def is_dtensor(value: object) -> bool:
    """Whether a rank has only a part of this tensor."""
    return _is(value, "torch.distributed.tensor", "DTensor")


def is_unit(module: nn.Module) -> bool:
    """Whether `fully_shard` (FSDP2) was called for this module."""
    return _is(module, "torch.distributed.fsdp", "FSDPModule")


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was called for a model or for a part of it."""
    return any(is_unit(module) for module in model.modules())


def is_fsdp1(module: nn.Module) -> bool:
    """Whether a module is a FullyShardedDataParallel, which torch had before `fully_shard`."""
    return _is(module, "torch.distributed.fsdp", "FullyShardedDataParallel")


def _is(value: object, module: str, name: str) -> bool:
    """Whether a value is of a class of torch, without importing the class's module.

    These modules take a second to import. Where a module was never imported, no value is of its
    classes.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
