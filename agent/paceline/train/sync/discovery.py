"""What a script does not say, and Python's garbage collector still knows.

The fallback where `session.optimizer` was not called, or was called without a scaler. What it can
and cannot find:

- **Optimisers and gradient scalers**: every living object of the class, in the whole process. An
  object that the script dropped may live until Python collects it, so a second look follows a
  collection. An optimiser or an enabled scaler that the script keeps but never uses counts as well:
  then there are two, and the all-reduce stays. A framework's wrapper that is no subclass of torch's
  class is not found, but the torch object inside it is. A look visits all objects that the
  collector tracks, some tenths of a second in a large process; it happens when a relaxed
  synchroniser is to come into force, once more after the optimiser's first step if it waited for
  that, and when the all-reduce comes back.
- **Whether an exception ends the loop over the loader**: Python closes a loop's iterator in the
  same way after a ``break`` and after an exception. CPython alone keeps what tells them apart, a
  traceback that points at the loop's frame. Where the loop itself is in a generator, the exception
  is hidden and looks like a ``break``.
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
    """The script's optimisers of these parameters, also those that have not stepped yet.

    Args:
        parameters: their `id`s.
    """
    return _alive(torch.optim.Optimizer, lambda optimiser: has_any(optimiser, parameters))


def scalers() -> list[torch.amp.GradScaler]:
    """The script's gradient scalers that are enabled."""
    return _alive(torch.amp.GradScaler, torch.amp.GradScaler.is_enabled)


def has_any(optimiser: torch.optim.Optimizer, parameters: set[int]) -> bool:
    """Whether an optimiser has any of these parameters, given by their `id`s."""
    groups = getattr(optimiser, "param_groups", [])  # none while the optimiser is being made
    return any(id(p) in parameters for group in groups for p in group["params"])


def exception_ends_loop() -> bool:
    """Whether an exception ends the loop over the loader, whose iterator is being closed.

    If so, a live traceback points at the loop frame's current instruction.
    """
    frame: FrameType | None = sys._getframe()
    for generators in (False, True):  # out of the loader's generator, and of others around it
        while frame is not None and _is_generators(frame) == generators:
            frame = frame.f_back
    return frame is not None and any(
        isinstance(referrer, TracebackType) and referrer.tb_lasti == frame.f_lasti
        for referrer in gc.get_referrers(frame)
    )


def _is_generators(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR)


def _alive(kind: type[_T], fits: Callable[[_T], bool]) -> list[_T]:
    def look() -> list[_T]:
        # Not isinstance: it would ask proxies for their class, which may fail.
        return [obj for obj in gc.get_objects() if issubclass(type(obj), kind) and fits(obj)]

    living = look()
    if len(living) > 1:
        del living
        gc.collect()
        living = look()
    return living
