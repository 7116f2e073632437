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
    """What a part of the model was called with, all of it from the batch, and what it returned.

    Args:
        name: of the part; empty: the model itself.
        module: the part.
        args: that it was called with.
        kwargs: that it was called with.
        places: of the call's tensors, the places in the batch that they come from.
        numbers: all floating-point tensors that it returned are single numbers, such as a loss.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    places: dict[Place, Place]
    numbers: bool


class Calls:
    """Notes the first training call of a model and of each of its upper parts.

    Of these, those are kept that the batch's tensors were given to. Activations are not: they would
    take memory that the script has in training.

    Args:
        model: the script's, as it was given to `Session.wrap`.
        in_step: whether the script is in a step now.
        batch: the tensors of the session's first batch.
    """

    def __init__(
        self,
        model: nn.Module,
        in_step: Callable[[], bool],
        batch: Callable[[], list[tuple[Place, Tensor]]],
    ) -> None:
        self.model = model
        self.called = False  # in a step
        self.draws = False  # the model draws random numbers in its forward pass
        self.random = ""  # names the state of torch's random numbers before its first call
        self.autocast: torch.dtype | None = None  # in force in a call
        self._in_step, self._batch = in_step, batch
        self._calls: dict[str, Call | None] = {}  # None: what it was given is not the batch's
        self._before = ""
        parts = [(n, m) for n, m in model.named_modules() if n.count(".") < _DEEPEST][:_MOST]
        self._hooks = [model.register_forward_pre_hook(_Hook(self._begins))]
        self._hooks += [
            module.register_forward_hook(_Hook(self._noting(name)), with_kwargs=True)
            for name, module in parts
        ]

    @property
    def of_parts(self) -> list[Call]:
        """The calls with the batch, the model's own first, then its parts' from the outside in."""
        kept = [call for call in self._calls.values() if call is not None]
        return sorted(kept, key=lambda call: (call.name != "", call.name.count(".")))

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
            if name not in self._calls:
                self._calls[name] = self._call(name, module, args, dict(kwargs), output)
            if not name:
                self.called = True
                self.draws |= random_state() != self._before

        return note

    def _call(
        self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Call | None:
        returned = [t.ndim for _, t in tensors(output) if t.is_floating_point()]
        try:
            places = _places([args, kwargs], self._batch())
        except Exception:  # of a kind of tensor that cannot be compared: the script goes on
            return None
        if places is None or not returned:
            return None
        return Call(name, module, args, kwargs, places, not any(returned))


class _Hook:
    """A function that a module calls. A copy of the module, or a pickle of it, calls nothing.

    So a teacher is not taken for the model, and a script can save the module as it is.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def _places(given: Any, batch: list[tuple[Place, Tensor]]) -> dict[Place, Place] | None:
    """Where the tensors that a part was given stand in the batch; None: not all of them do.

    A number, such as how many labels count, stays what it was.
    """
    places: dict[Place, Place] = {}
    for place, tensor in tensors(given):
        if tensor.ndim == 0:
            continue
        equal = [(source, part) for source, part in batch if _is_same(tensor, part)]
        if not equal:
            return None
        # Of several equal ones: the very same tensor, or else one of the same name.
        equal.sort(key=lambda each: (each[1] is not tensor, each[0][-1:] != place[-1:]))
        places[place] = equal[0][0]
    return places or None


def _is_same(tensor: Tensor, part: Tensor) -> bool:
    """Whether a tensor is a part of the batch, perhaps on another device or of another type."""
    if tensor is part:
        return True
    if tensor.shape != part.shape:
        return False
    return bool(torch.equal(tensor.detach().cpu().double(), part.detach().cpu().double()))


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
