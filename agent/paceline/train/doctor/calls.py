"""Records the first calls of a model within training steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class Calls:
    """Record of a model's calls in training. `in_step` returns whether the script is in a step."""

    def __init__(self, model: nn.Module, in_step: Callable[[], bool]) -> None:
        self.model = model
        # The model was called in a step.
        self.called = False
        # The model draws random numbers in its forward pass.
        self.draws = False
        # Hash of torch's random state before the model's first call.
        self.random = ""
        # The dtype of an active autocast in a call.
        self.autocast: torch.dtype | None = None
        self._in_step = in_step
        self._before = ""
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self._begins)),
            model.register_forward_hook(_Hook(self._ends)),
        ]

    def close(self) -> None:
        """Remove the hooks."""
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
    """A module hook that does nothing in a copy or an unpickled instance of the module.

    So a teacher model, which is a copy, is not taken for the model, and a script can save the
    model without the hook.
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
    """Return a hash of torch's random state, of the CPU and of this rank's GPU."""
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.update(torch.cuda.get_rng_state().numpy().tobytes())
    return state.hexdigest()


def _autocast() -> torch.dtype | None:
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None
