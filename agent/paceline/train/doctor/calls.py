"""The first calls of a model and of its parts in a step of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_DEEPEST = 2  # levels of parts below the model
_MOST = 64  # parts

Place = tuple[Any, ...]  # keys and positions that lead to a tensor


@dataclass(frozen=True)
class Call:
    """What a part of the model was called with, and what it returned."""

    name: str  # of the part; empty: the model itself
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Calls:
    """Notes the first training call of a model and of each of its upper parts.

    Args:
        model: the script's, as it was given to `Session.wrap`.
        in_step: whether the script is in a step now.
    """

    def __init__(self, model: nn.Module, in_step: Callable[[], bool]) -> None:
        self.model = model
        self.draws = False  # the model draws random numbers in its forward pass
        self.random = ""  # names the state of torch's random numbers before its first call
        self.autocast: torch.dtype | None = None  # in force in a call
        self._in_step = in_step
        self._calls: dict[str, Call] = {}
        self._before = ""
        parts = [(n, m) for n, m in model.named_modules() if n.count(".") < _DEEPEST][:_MOST]
        self._hooks = [model.register_forward_pre_hook(self._begins)]
        self._hooks += [
            module.register_forward_hook(self._noting(name), with_kwargs=True)
            for name, module in parts
        ]

    @property
    def of_parts(self) -> list[Call]:
        """The calls, the model's own first, and then those of its parts from the outside in."""
        return sorted(
            self._calls.values(), key=lambda call: (call.name != "", call.name.count("."))
        )

    def close(self) -> None:
        """Notes nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begins(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._in_step():
            return
        self._before = random_state()
        self.random = self.random or self._before

    def _noting(self, name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if torch.compiler.is_compiling() or not self._in_step():
                return
            self.autocast = self.autocast or _autocast()
            self._calls.setdefault(name, Call(name, module, args, dict(kwargs), output))
            if not name:
                self.draws |= random_state() != self._before

        return note


def random_state() -> str:
    """Names the state of torch's random numbers: of the CPU, and of this rank's GPU."""
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.update(torch.cuda.get_rng_state().numpy().tobytes())
    return state.hexdigest()


def _autocast() -> torch.dtype | None:
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None


def tensors(value: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """The tensors in a value, also in lists, tuples and mappings, with their places."""
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, (*place, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from tensors(item, (*place, number))


def at(value: Any, place: Place) -> Any:
    """What is at a place that `tensors` gave.

    Raises:
        LookupError, TypeError: there is no such place.
    """
    for key in place:
        value = value[key]
    return value
