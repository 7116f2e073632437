"""The first calls of a model in a step of training."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Calls:
    """Notes the training calls of a model.

    Args:
        model: the script's, as it was given to `Session.wrap`.
        in_step: whether the script is in a step now.
    """

    def __init__(self, model: nn.Module, in_step: Callable[[], bool]) -> None:
        self.model = model
        self.called = False  # in a step
        self.draws = False  # the model draws random numbers in its forward pass
        self.random = ""  # names the state of torch's random numbers before its first call
        self.autocast: torch.dtype | None = None  # in force in a call
        self._in_step = in_step
        self._before = ""
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self._begins)),
            model.register_forward_hook(_Hook(self._ends)),
        ]

    def close(self) -> None:
        """Stop noting calls."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begins(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._in_step():
            return
        self._before = random_state()
        self.random = self.random or self._before

    def _ends(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._in_step():
            return
        self.autocast = self.autocast or _autocast()
        self.called = True
        self.draws |= random_state() != self._before


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
