"""Numba with types. Compiled code is cached beside the source or in the user's cache folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles `function` at its first call, for the types of its arguments; releases the GIL."""
    return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
