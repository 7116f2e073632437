"""Numba with types: compiled once, then read from a cache beside the source or in the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import numba

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Compiles at the first call, for the types of its arguments; releases the GIL."""
    return numba.njit(cache=True, nogil=True)(function)  # type: ignore[no-any-return]
