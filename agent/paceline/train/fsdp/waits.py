"""Measures how long ranks wait for each other within the passes of a sharded model.

FSDP gathers a unit's parameters before the unit's forward pass and, if they were freed, before its
backward pass. After the backward pass it reduces the unit's gradients. FSDP calls these collectives
in hooks, which torch runs in the order of registration. So this module registers a hook before and
after each of FSDP's hooks. The time between this pair of hooks counts as waiting, not computing.
On a CUDA device, times are events of the computing stream. So a collective in another stream counts
as waiting only while the computing stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from paceline.train.ddp import CurrentStep
from paceline.train.timing import RunningStep

# FSDP's autograd node that reduces a unit's gradients.
_REDUCING = "RegisterPostBackwardFunctionBackward"


class FsdpWaits:
    """Hooks that count FSDP's collectives of one model as waiting. Not thread-safe."""

    def __init__(self, current: CurrentStep) -> None:
        self._current, self._model = current, current.models
        current.models += 1
        self._collective: AbstractContextManager[None] | None = None
        # The outputs of each module's forward pass, by the module's `id`: stored by the first hook
        # after the pass, and removed by the second.
        self._made: dict[int, list[Tensor]] = {}
        self._backward: RunningStep | None = None
        # True if the callback `_reduced` must still be queued for the end of the backward pass.
        self._ends = False

    def watch(self, modules: Iterable[nn.Module]) -> list[RemovableHandle]:
        """Put hooks around FSDP's hooks on these modules; return the handles that remove them."""
        handles = []
        for module in modules:
            handles += [
                module.register_forward_pre_hook(self._before_forward, prepend=True),
                module.register_forward_pre_hook(self._at_forward, with_kwargs=True),
                module.register_forward_hook(self._after_forward, prepend=True),
                module.register_forward_hook(self._forward_done),
            ]
        return handles

    def _begin(self, *_: Any) -> None:
        running = self._current.running
        if running is not None and self._collective is None:
            self._collective = running.in_collective()
            self._collective.__enter__()

    def _end(self, *_: Any) -> None:
        collective, self._collective = self._collective, None
        if collective is not None:
            collective.__exit__(None, None, None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, *_: Any) -> None:
        self._begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _at_forward(self, _: nn.Module, inputs: Any, more: Any) -> None:
        self._end()
        if self._current.running is None or not torch.is_grad_enabled():
            return
        self._current.forward()
        for node in {tensor.grad_fn for tensor in _differentiable((inputs, more))}:
            if node is not None and type(node).__name__ == _REDUCING:
                node.register_prehook(self._begin)
                node.register_hook(self._end)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _after_forward(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._current.running is None or not torch.is_grad_enabled():
            return
        self._made[id(module)] = tensors = _differentiable(output)
        for tensor in tensors:
            tensor.register_hook(self._before_backward)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _forward_done(self, module: nn.Module, *_: Any) -> None:
        for tensor in self._made.pop(id(module), []):
            tensor.register_hook(self._at_backward)  # type: ignore[no-untyped-call]

    def _before_backward(self, _: Tensor) -> None:
        running = self._current.running
        if running is not None and self._backward is not running:
            self._current.reducing(running, self._model)
            self._backward, self._ends = running, True
            _queue(self._computed)
        self._begin()

    def _at_backward(self, _: Tensor) -> None:
        self._end()
        if self._ends:
            self._ends = False
            _queue(self._reduced)

    def _computed(self) -> None:
        """Record the end of computing; FSDP's own callback then reduces the last gradients."""
        self._end()
        if self._backward is not None:
            self._backward.gradients_ready()

    def _reduced(self) -> None:
        running, self._backward = self._backward, None
        if running is not None:
            running.reduced()


def _queue(callback: Callable[[], None]) -> None:
    """Queue a callback for the end of the backward pass; callbacks run in the order of queueing."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _differentiable(values: Any) -> list[Tensor]:
    leaves = tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
