"""Reads FSDP's state of a sharded model, and refuses models whose gradients would be wrong.

`fully_shard` has no public access to its mesh, its divide factor or its hooks. So this module reads
private attributes of torch 2.8 to 2.13. `tests/integration/train/test_fsdp.py` fails if a release
has other attributes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.train.fsdp.kinds import is_unit
from paceline.train.startup import Lanes

_OUTSIDE = (
    "parameter {name} is not sharded by fully_shard, so FSDP does not reduce its gradient: call "
    "fully_shard(model) on the model itself after its parts, without ignored_params, or freeze the "
    "parameter"
)
_PART_OF_RANKS = (
    "is sharded over {size} of {world} ranks, but Paceline plans a separate batch for each rank: "
    "give fully_shard a mesh of all ranks, with one dimension or two (replicate × shard); where "
    "ranks share a batch, as in tensor parallelism, give Session the data-parallel part, "
    'Session(mesh=mesh["dp"])'
)
_OTHER_MESH = (
    "is sharded over ranks {given}, but the data-parallel ranks of Session(mesh=…) are {ranks}: "
    "give fully_shard the same mesh as Session"
)
_FACTOR = (
    "has a gradient divide factor of {factor}, but Paceline's weights assume the mean over ranks: "
    "leave set_gradient_divide_factor out"
)
_HOOK = (
    "has a custom all-reduce hook, whose effect on weighted gradients is unknown: leave "
    "set_all_reduce_hook out; for replicas of sharded models give fully_shard a mesh of two "
    "dimensions"
)


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together, and whose gradients FSDP reduces together.

    `name` is the name of the unit's module, `group` is torch's FSDPParamGroup.
    """

    name: str
    group: Any

    @property
    def device(self) -> torch.device:
        """Return the device on which the unit computes; its parameters may be on the CPU."""
        device: torch.device = self.group.device
        return device

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return the sharded parameters, which optimisers step."""
        return [each.sharded_param for each in self.group.fsdp_params]

    @property
    def places(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield each module and attribute name under which the model has one of the parameters."""
        for each in self.group.fsdp_params:
            info = each._module_info
            yield info.module, info.param_name
            yield from zip(info.shared_modules, info.shared_param_names, strict=True)

    @property
    def ranks(self) -> list[int]:
        """Return the ranks over which the unit is sharded."""
        return [int(rank) for rank in self.group.mesh_info.mesh.mesh.flatten()]

    def refusal(self, ranks: Sequence[int] | None) -> str | None:
        """Return why the unit's gradients cannot be weighted; None if they can.

        The reason is a text that can follow the unit's name. `ranks` are the ranks that have
        batches of their own; None: all ranks.
        """
        given = self.ranks
        world = dist.get_world_size() if ranks is None else len(ranks)
        if ranks is None and len(given) != world:
            return _PART_OF_RANKS.format(size=len(given), world=world)
        if ranks is not None and given != list(ranks):
            return _OTHER_MESH.format(given=given, ranks=list(ranks))
        # The names of the divide factor in newer and in older releases of torch.
        for name in ("gradient_divide_factor", "reduce_scatter_reduce_op"):
            factor = getattr(self.group, name, None)
            if factor is not None and factor != world:
                return _FACTOR.format(factor=factor)
        return _HOOK if self.group._all_reduce_hook is not None else None


def units(model: nn.Module) -> Iterator[Unit]:
    """Yield the units of a model, in the order of its modules."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        for group in _groups(module) if is_unit(module) else []:
            # Several modules may form one unit.
            if id(group) not in seen:
                seen.add(id(group))
                yield Unit(name, group)


def refuse(model: nn.Module, ranks: Sequence[int] | None = None) -> None:
    """Refuse a sharded model whose gradients would be wrong.

    `ranks` are the ranks that have batches of their own; None: all ranks.

    Raises:
        ValueError: the message names the unit or the parameter, and the fix.
    """
    inside: set[tuple[int, str]] = set()
    for unit in units(model):
        if (why := unit.refusal(ranks)) is not None:
            raise ValueError(f"{unit.name or 'the model'} {why}")
        inside |= {(id(module), name) for module, name in unit.places}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and (id(module), name) not in inside:
                raise ValueError(_OUTSIDE.format(name=f"{prefix}.{name}".lstrip(".")))


def refuse_apart(model: nn.Module, lanes: Lanes) -> None:
    """Refuse unsplit parameters whose values differ between the ranks of a group. Collective.

    Each rank of a group computes with its own copy of a parameter that is not split within the
    group, but a checkpoint has only one copy.

    Raises:
        ValueError: raised on all ranks; the message names the ranks of the group.
    """
    names = {id(module): name for name, module in model.named_modules()}
    mine: dict[str, tuple[float, float]] = {}
    for unit in units(model):
        size = len(unit.ranks)
        for each in unit.group.fsdp_params:
            info, own = each._module_info, each.sharded_param
            if own.device_mesh.size() == size and not own.is_meta:
                values = own.to_local().detach().double()
                name = f"{names[id(info.module)]}.{info.param_name}".lstrip(".")
                mine[name] = float(values.sum()), float(values.norm())
    words: list[Any] = [mine] * dist.get_world_size()
    dist.all_gather_object(words, mine)
    for members in zip(*lanes.ranks, strict=True):
        if any(words[rank].keys() != words[members[0]].keys() for rank in members):
            raise ValueError(
                f"ranks {list(members)}, which share each batch, hold parameters of different "
                "names, as stages of a pipeline do: give Session a mesh whose groups hold the "
                "whole model"
            )
        for name, of_first in words[members[0]].items():
            if not all(_alike(words[rank][name], of_first) for rank in members):
                raise ValueError(
                    f"parameter {name} differs between ranks {list(members)}, which share each "
                    "batch: seed these ranks identically before creating the model, or split the "
                    "parameter with parallelize_module"
                )


def _alike(values: Sequence[float], others: Sequence[float]) -> bool:
    """Compare values with a tolerance, because devices sum numbers in different orders."""
    return all(
        math.isclose(value, other, rel_tol=1e-6, abs_tol=1e-9)
        or (math.isnan(value) and math.isnan(other))
        for value, other in zip(values, others, strict=True)
    )


def _groups(module: Any) -> list[Any]:
    """Return torch's parameter groups of a module; releases before 2.10 have a single one."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]
