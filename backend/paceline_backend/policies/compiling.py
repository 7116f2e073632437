"""Numba, and a cache of compiled code that no plan depends on: what `jit.Kernel` imports.

Numba keeps the machine code of kernels in
``__pycache__`` beside the source, or, where that cannot be written, in the user's cache folder.
Images hold code that was compiled when they were built (docker/control-plane.Dockerfile): its
folder can only be read, and so can the home of the user. Numba refuses to work there, and raises
an error too where a full disk or a file of another user stops it. Here all of that only costs the
time to compile: a cache that cannot be read has no code, and one that cannot be written gets none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numba
from numba.core import caching
from numba.extending import typeof_impl

logger = logging.getLogger(__name__)


class _BuiltBeside(caching.InTreeCacheLocator):  # type: ignore[misc]
    """Code that is in ``__pycache__`` beside the source already, where nothing can be added."""

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> Self | None:
        locator = cls(function, file)
        index = f"{Path(file).stem}.*-{locator.get_disambiguator()}.py*.nbi"
        return locator if any(Path(locator.get_cache_path()).glob(index)) else None


class _Kernels(caching.CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (
        caching.UserProvidedCacheLocator,
        caching.InTreeCacheLocator,
        _BuiltBeside,
        caching.UserWideCacheLocator,
    )


class _Cache(caching.FunctionCache):  # type: ignore[misc]
    """Numba's cache, without its errors."""

    _impl_class = _Kernels

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            return super().load_overload(signature, context)
        except Exception as error:  # pickle raises any, of a file that is not whole
            logger.warning("cannot read compiled code of %s: %r", self._name, error)
            with suppress(OSError):
                self.flush()  # or else no later code could be added
            return None

    def save_overload(self, signature: Any, code: Any) -> None:
        try:
            super().save_overload(signature, code)
        except Exception as error:
            logger.info("cannot keep compiled code of %s: %r", self._name, error)


def dispatcher(function: Callable[..., Any], kernels: type[Any]) -> Any:
    """Return what compiles `function` for the types of its arguments, and releases the GIL.

    Args:
        function: to compile.
        kernels: the class of objects with a `dispatcher`, which compiled functions may call.
    """
    typeof_impl.register(kernels)(lambda kernel, context: typeof_impl(kernel.dispatcher, context))
    made = numba.njit(nogil=True)(function)
    try:
        made._cache = _Cache(function)
    except (RuntimeError, OSError) as error:  # no folder can be read or written
        logger.info("keep compiled code of %s in memory only: %s", function.__qualname__, error)
    return made
