"""What FSDP knows of a sharded model, and refusals of what would give wrong gradients.

`fully_shard` has no public way to ask for its mesh, its divide factor or its hooks. So this module
reads private attributes of torch 2.8 to 2.13. `tests/integration/train/test_fsdp.py` fails where a
release has others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.train.fsdp.kinds import is_unit

_OUTSIDE = (
    "parameter {name} is in no unit of fully_shard, so FSDP reduces no gradient of it: call "
    "fully_shard(model) on the model itself after its parts, without ignored_params, or freeze the "
    "parameter"
)
_PART_OF_RANKS = (
    "is sharded over {size} of {world} ranks, and Paceline plans a batch of its own for each rank: "
    "give fully_shard a mesh of all ranks, of one dimension or of two (replicate × shard); ranks "
    "that share a batch, as under tensor, pipeline or expert parallelism, are not supported"
)
_FACTOR = (
    "has a gradient divide factor of {factor}, and Paceline's weights are for the mean over ranks: "
    "leave set_gradient_divide_factor out"
)
_HOOK = (
    "has an all-reduce hook of your own, and what it makes of weighted gradients is unknown: leave "
    "set_all_reduce_hook out; for replicas of sharded models give fully_shard a mesh of two "
    "dimensions"
)


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers, and whose gradients it reduces, together."""

    name: str  # of the module
    group: Any  # torch's FSDPParamGroup

    @property
    def device(self) -> torch.device:
        """Where it computes; parameters may be on the CPU meanwhile."""
        device: torch.device = self.group.device
        return device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters, which optimisers have."""
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Where its parameters are: the module, and the attribute."""
        for each in self.group.fsdp_params:
            info = each._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)

    def refusal(self, world: int) -> str | None:
        """Why it cannot be weighed, in words that follow its name; None: it can.

        Args:
            world: W.
        """
        size = self.group.mesh_info.mesh.size()
        if size != world:
            return _PART_OF_RANKS.format(size=size, world=world)
        for name in ("gradient_divide_factor", "reduce_scatter_reduce_op"):  # newer, older releases
            factor = getattr(self.group, name, None)
            if factor is not None and factor != world:
                return _FACTOR.format(factor=factor)
        return _HOOK if self.group._all_reduce_hook is not None else None


def units(model: nn.Module) -> Iterator[Unit]:
    """The units of a model, in the order of its modules."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for group in _groups(module) if is_unit(module) else []:
            if id(group) not in seen:  # several modules may be one unit
                seen.add(id(group))
                yield Unit(name, group)


def refuse(model: nn.Module) -> None:
    """Refuses a sharded model whose gradients would be wrong.

    Args:
        model: that `fully_shard` was called for.

    Raises:
        ValueError: the message names the unit or the parameter, and what to do instead.
    """
    inside: set[tuple[int, str]] = set()
    for unit in units(model):
        if (why := unit.refusal(dist.get_world_size())) is not None:
            raise ValueError(f"{unit.name or 'the model'} {why}")
        inside |= {(id(module), name) for module, name in unit.places}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and (id(module), name) not in inside:
                raise ValueError(_OUTSIDE.format(name=f"{prefix}.{name}".lstrip(".")))


def _groups(module: Any) -> list[Any]:
    """Torch's groups of parameters of a module; releases before 2.10 know of one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
