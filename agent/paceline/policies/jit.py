"""Kernels of `predict` and `solve`, which Numba compiles at their first call.

A `Kernel` imports Numba only when it is first called: the import takes a second of CPU and 60 MB,
and most processes that import policies never plan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


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
        """Call the compiled function."""
        result: R = self.dispatcher(*args, **kwargs)
        return result


def compiled(function: Callable[P, R]) -> Kernel[P, R]:
    """Wrap the decorated function in a `Kernel`."""
    return Kernel(function)
