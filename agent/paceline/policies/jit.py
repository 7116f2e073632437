"""Kernels of `predict` and `solve`, which Numba compiles at their first call.

A `Kernel` imports Numba only when it is first called: the import takes a second of CPU and 60 MB,
and most processes that import policies never plan.

A kernel is also a Python function, with the same results, but 10 to 30 times as slow. A process
that must plan before its kernels are compiled calls `interpret_until`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_NICE = 10
# Set while kernels run as Python functions.
_interpreting = threading.Event()


class Kernel(Generic[P, R]):
    """A function that is compiled at its first call and releases the GIL; it may call kernels."""

    def __init__(self, function: Callable[P, R]) -> None:
        self.function = function
        update_wrapper(self, function)

    @cached_property
    def dispatcher(self) -> Any:
        """The function's Numba dispatcher."""
        from paceline.policies.compiling import dispatcher

        return dispatcher(self.function, Kernel)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the compiled function, or the Python function while `interpret_until` compiles."""
        if _interpreting.is_set():
            return self.function(*args, **kwargs)
        result: R = self.dispatcher(*args, **kwargs)
        return result


def compiled(function: Callable[P, R]) -> Kernel[P, R]:
    """Wrap the decorated function in a `Kernel`."""
    return Kernel(function)


def interpret_until(compile_all: Callable[[], None]) -> None:
    """Run kernels as Python functions until `compile_all` has compiled them in a new thread.

    The thread has a low priority: compiling takes ten seconds where no cache has the code.
    """

    def compile_kernels() -> None:
        # On Linux a thread has a priority of its own.
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            compile_all()
        # Planning goes on without compiled code.
        except Exception as error:
            logger.warning("kernels cannot be compiled: %s", error, exc_info=error)
        else:
            _interpreting.clear()

    _interpreting.set()
    threading.Thread(target=compile_kernels, name="paceline-kernels", daemon=True).start()
