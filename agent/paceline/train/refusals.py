"""Models and options that `Session.wrap` refuses because they would train wrongly.

The functions raise a ValueError, whose message names the layer or the option, and the fix.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from paceline.train import batchnorm as norms
from paceline.train.ddp import SingleProcess
from paceline.train.fsdp.kinds import is_dtensor, is_fsdp1, is_sharded, is_unit
from paceline.train.fsdp.model import is_wrapped
from paceline.train.fsdp.units import refuse, refuse_apart
from paceline.train.startup import Lanes

_OPTIONS = {
    "process_group": "gradients are weighted over all ranks: leave it out",
    "device_mesh": "gradients are weighted over all ranks: leave it out",
    "delay_all_reduce_named_params": "gradients of these parameters would not be weighted: leave "
    "it out",
    "param_to_hook_all_reduce": "gradients of this parameter would not be weighted: leave it out",
    "mixed_precision": "it needs DDP's only communication hook, in which Paceline reduces "
    "gradients: use torch.autocast",
}


def refuse_model(
    model: nn.Module, batchnorm: str | None, options: dict[str, Any], lanes: Lanes | None = None
) -> None:
    """Refuse a model, a layer or an option that would give wrong gradients. All ranks call it."""
    if batchnorm not in (None, "sync", "local"):
        raise ValueError(f"batchnorm={batchnorm!r}: give 'sync' or 'local', or leave it out")
    sharded = is_unit(model)
    for name, layer in model.named_modules():
        why = _wrapper(layer, sharded) or _layer(layer, batchnorm)
        if why is not None:
            raise ValueError(f"{name or 'the model'} {why}")
    if sharded:
        _refuse_sharded(model, options, lanes)
        return
    if lanes is not None:
        raise ValueError(
            "the model is not sharded, but ranks share batches in the mesh of Session: call "
            "fully_shard(model, mesh=…) with that mesh, after parallelize_module; for replicas "
            "instead of shards, give fully_shard a mesh of two dimensions, replicate × shard, "
            "with one rank in the second"
        )
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            raise ValueError(
                f"parameter {name} is a DTensor, of which each rank has a part, but Paceline "
                "weights whole gradients: give session.wrap the model before parallelize_module or "
                "distribute_tensor, or shard it over all ranks with fully_shard; for tensor "
                'parallelism give Session the data-parallel part of the mesh, mesh=mesh["dp"]'
            )
    for option, reason in _OPTIONS.items():
        if options.get(option) is not None:
            raise ValueError(f"wrap(..., {option}=…) is not supported: {reason}")


def _refuse_sharded(model: nn.Module, options: dict[str, Any], lanes: Lanes | None) -> None:
    if options:
        raise ValueError(
            f"wrap(..., {min(options)}=…) is an option of DistributedDataParallel, but the model "
            "is sharded by fully_shard: leave it out, and use the methods of the sharded model "
            "instead"
        )
    if is_wrapped(model):
        raise ValueError(
            "the model is sharded and already wrapped by a session: give it to session.wrap once, "
            "or close the other session first"
        )
    refuse(model, None if lanes is None else lanes.lane)
    if lanes is not None:
        refuse_apart(model, lanes)


def _wrapper(layer: nn.Module, sharded: bool) -> str | None:
    """Return the reason to refuse a wrapper that reduces gradients before they are weighted.

    Return None if the layer is no such wrapper. `sharded` is True if `fully_shard` was called for
    the whole model.
    """
    if isinstance(layer, DistributedDataParallel | SingleProcess):
        return (
            f"is already a {type(layer).__name__}: give session.wrap the plain model, once, "
            f"instead of DistributedDataParallel{_plain_on_ray()}"
        )
    if is_unit(layer) and not sharded:
        return (
            "is sharded by FSDP2 (fully_shard), but the model passed to session.wrap is not: call "
            "fully_shard on the whole model, too, after its parts, and give session.wrap that "
            "model itself, not the result of torch.compile"
        )
    if is_fsdp1(layer):
        return (
            "is a FullyShardedDataParallel, which reduces gradients before Paceline can weight "
            f"them: shard the model with fully_shard (FSDP2), or leave FSDP out{_plain_on_ray()}"
        )
    return None


def _plain_on_ray() -> str:
    if "ray.train.torch" not in sys.modules:
        return ""
    return "; Ray Train's prepare_model(model, parallel_strategy=None) does not wrap it"


def _layer(layer: nn.Module, batchnorm: str | None) -> str | None:
    if (why := norms.refusal(layer, batchnorm)) is not None:
        return why
    if batchnorm is None and isinstance(layer, _BatchNorm) and not norms.is_shared(layer):
        return (
            f"is a {type(layer).__name__}: it computes statistics over the local batch, whose size "
            "Paceline changes, so training differs from single-process training; share statistics "
            "between ranks with wrap(model, batchnorm='sync'), or accept the difference with "
            "wrap(model, batchnorm='local')"
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
        return "has sparse gradients, which Paceline cannot weight: use sparse=False"
    return None


def refuse_accumulation(model: nn.Module, batchnorm: str | None, options: dict[str, Any]) -> None:
    """Refuse layers and options of DistributedDataParallel that are wrong with micro-batches."""
    reasons = {
        "static_graph": "PyTorch's reducer would reduce in each backward pass",
        "find_unused_parameters": "gradients of parameters that the last micro-batch does not use "
        "would not be reduced",
    }
    if is_sharded(model):
        raise ValueError(
            "the model is sharded by fully_shard, whose ranks gather parameters from each other in "
            "each pass, but with Session(micro_batches=True) the number of passes differs between "
            "ranks: leave micro_batches out, or fully_shard"
        )
    if norms.shares_statistics(model, batchnorm):
        raise ValueError(
            "wrap(batchnorm='sync'), or a SyncBatchNorm, and Session(micro_batches=True) cannot be "
            "combined: no pass sees the whole global batch; give batchnorm='local', or leave "
            "micro_batches out"
        )
    for name, why in reasons.items():
        if options.get(name):
            raise ValueError(
                f"wrap({name}=True) and Session(micro_batches=True) cannot be combined: {why}; "
                "leave one of them out"
            )
