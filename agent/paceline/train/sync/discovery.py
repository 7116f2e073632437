"""Finds a script's optimisers and scalers, and finds out whether an exception ends its loop.

The methods depend on Python's internals, and have limits:

- **Optimisers and gradient scalers** are searched for if `session.optimizer` was not called, or was
  called without a scaler. A search visits all objects that the garbage collector tracks, which
  takes some tenths of a second in a large process. A dropped object may live until Python collects
  it, so a second search follows a collection. An optimiser or an enabled scaler that the script
  keeps but never uses is found, too. Then relaxed synchronisation, which supports only one of each,
  cannot be used. If a framework's wrapper is no subclass of torch's class, a search finds only the
  torch object inside it.
- **Whether an exception ends the loop over the loader**: Python closes a loop's iterator in the
  same way after a ``break`` and after an exception. Only CPython shows the difference: a traceback
  that points at the loop's frame exists only after an exception. If the loop itself is in a
  generator, the exception is hidden and looks like a ``break``.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

import torch

_T = TypeVar("_T")


def optimisers(parameters: set[int]) -> list[torch.optim.Optimizer]:
    """Return all optimisers that have any of these parameters (`id`s), even if unused so far."""
    return _alive(torch.optim.Optimizer, lambda optimiser: has_any(optimiser, parameters))


def scalers() -> list[torch.amp.GradScaler]:
    """Return the script's enabled gradient scalers."""
    return _alive(torch.amp.GradScaler, torch.amp.GradScaler.is_enabled)


def has_any(optimiser: torch.optim.Optimizer, parameters: set[int]) -> bool:
    """Return whether an optimiser has any of these parameters, given by their `id`s."""
    # An optimiser has no groups while it is being made.
    groups = getattr(optimiser, "param_groups", [])
    return any(id(p) in parameters for group in groups for p in group["params"])


def exception_ends_loop() -> bool:
    """Return whether an exception ends the loop over the loader, whose iterator is being closed.

    If so, a live traceback points at the loop frame's current instruction.
    """
    frame: FrameType | None = sys._getframe()
    # First leave the frames of the loader's generator, then those of generators around the loader.
    for generators in (False, True):
        while frame is not None and _is_generators(frame) == generators:
            frame = frame.f_back
    return frame is not None and any(
        isinstance(referrer, TracebackType) and referrer.tb_lasti == frame.f_lasti
        for referrer in gc.get_referrers(frame)
    )


def _is_generators(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def _alive(kind: type[_T], fits: Callable[[_T], bool]) -> list[_T]:
    def find() -> list[_T]:
        # `isinstance` would read the `__class__` of proxy objects, which may raise.
        return [obj for obj in gc.get_objects() if issubclass(type(obj), kind) and fits(obj)]

    living = find()
    if len(living) > 1:
        del living
        gc.collect()
        living = find()
    return living
