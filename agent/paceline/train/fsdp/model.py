"""A sharded model whose gradients are weighed, right for uneven and for empty local batches."""

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
from paceline.train.fsdp.waits import Waits

_PROFILE = (
    "session.profile: ranks of a sharded model gather parameters from each other in each pass, so "
    "no rank can try batches by itself: leave it out, and give Session(limits=…) if memory is short"
)

_wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # sharded models, by open sessions


class WeightedFSDP(nn.Module):
    """What a session keeps of a sharded model; the script keeps the model itself.

    FSDP computes with whole parameters, which it makes when it first gathers them and fills again
    each time. Each gradient of a whole parameter is weighed when autograd has computed it, before
    FSDP adds it to one from an earlier pass or reduces it. So gradients that accumulate are weighed
    with the weights of their own steps, and FSDP's mean over ranks is that of the global batch.

    Args:
        module: the model, which `refuse` has let pass.
        current: the current step of the session.
    """

    static_graph = False

    def __init__(self, module: nn.Module, current: CurrentStep) -> None:
        super().__init__()
        self.module = module
        self._current = current
        self._units: list[Any] = [part for part in module.modules() if is_unit(part)]
        self._weighed: dict[int, nn.Parameter] = {}  # whole parameters, by their ids
        self._trained: list[bool] = []  # of the sharded parameters, when they were last looked at
        self._handles: list[RemovableHandle] = Waits(current).watch(self._units)
        self._uncounted = ExitStack()  # of a filler's forward pass
        self._handles += [
            module.register_forward_pre_hook(self._forward_begins),
            module.register_forward_hook(self._forward_ends, always_call=True),
        ]
        _wrapped.add(module)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The sharded parameters, which the optimiser has, whatever the model computes with now."""
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
        """Before a step: sees to it that each gradient will be weighed. All ranks call it.

        Raises:
            ValueError: the script has changed the model to what `refuse` refuses.
        """
        trained = [parameter.requires_grad for parameter in self.parameters()]
        if trained == self._trained:
            return
        self._trained = trained
        group = self._current.group
        refuse(self.module, None if group is None else dist.get_process_group_ranks(group))
        # Those of another unit, which is sharded, are met as its own.
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
        """Does nothing: whether passes reduce gradients, the script alone says."""

    def unreduced(self) -> Any:
        """Refused: a rank's passes need the other ranks.

        Raises:
            ValueError: always.
        """
        raise ValueError(_PROFILE)

    def close(self) -> None:
        """The session is over: the model is as before, and another session may wrap it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._weighed.clear()
        self._trained = []
        _wrapped.discard(self.module)


Wrapped = WeightedDDP | SingleProcess | WeightedFSDP


def wrap(model: nn.Module, current: CurrentStep, options: dict[str, Any]) -> Wrapped:
    """What a session keeps of a model.

    Args:
        model: the script's, which `refuse_model` has let pass.
        current: the current step of the session.
        options: of DistributedDataParallel.
    """
    if is_unit(model):
        return WeightedFSDP(model, current)
    return ddp.wrap(model, current, options)


def device_of(model: Wrapped) -> torch.device | None:
    """Where a wrapped model computes; None: it has no parameter.

    Parameters of a sharded model may be kept on the CPU.
    """
    if isinstance(model, WeightedFSDP):
        return next((unit.device for unit in units(model.module)), None)
    return next((parameter.device for parameter in model.parameters()), None)


def is_sharded(model: Wrapped) -> bool:
    """Return whether a wrapped model is sharded."""
    return isinstance(model, WeightedFSDP)


def is_wrapped(model: nn.Module) -> bool:
    """Whether an open session has wrapped this sharded model."""
    return model in _wrapped


def begin(models: Iterable[Wrapped]) -> None:
    """Before a step; see `WeightedFSDP.begin`."""
    for model in models:
        if isinstance(model, WeightedFSDP):
            model.begin()


def close(models: Iterable[Wrapped]) -> None:
    """After the session's end; see `WeightedFSDP.close`."""
    for model in models:
        if isinstance(model, WeightedFSDP):
            model.close()
