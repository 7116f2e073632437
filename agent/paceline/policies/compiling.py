"""Compilation of kernels with Numba, and its cache; only `jit.Kernel` imports this module.

Numba keeps the machine code in ``__pycache__`` beside the source, or else in the user's cache
folder. Container images contain code that was compiled when the image was built
(docker/control-plane.Dockerfile). In such a container both folders are read-only, and Numba raises
an error, as it does if the disk is full or a file belongs to another user. This module catches the
error: if the cache cannot be read, kernels are compiled again, and if the cache cannot be written,
the compiled code is only kept in memory.
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
    """A cache locator for a read-only ``__pycache__`` that already has the function's code."""

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
    _impl_class = _Kernels

    def load_overload(self, signature: Any, context: Any) -> Any:
        try:
            return super().load_overload(signature, context)
        # On a truncated file, pickle may raise any exception.
        except Exception as error:
            logger.warning("cannot read compiled code of %s: %r", self._name, error)
            # Without a flush of the index, no code could be added later.
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature: Any, code: Any) -> None:
        try:
            super().save_overload(signature, code)
        except Exception as error:
            logger.info("cannot cache compiled code of %s: %r", self._name, error)


def dispatcher(function: Callable[..., Any], kernels: type[Any]) -> Any:
    """Return a dispatcher that compiles `function` for its argument types and releases the GIL.

    `kernels` is the class of wrapped functions (`jit.Kernel`), whose instances have a Numba
    dispatcher as attribute `dispatcher`. Compiled functions may call these instances.
    """
    typeof_impl.register(kernels)(lambda kernel, context: typeof_impl(kernel.dispatcher, context))
    made = numba.njit(nogil=True)(function)
    try:
        made._cache = _Cache(function)
    # Numba raises one of these errors if it can use no cache folder at all.
    except (RuntimeError, OSError) as error:
        logger.info(
            "compiled code of %s is cached in memory only: %s", function.__qualname__, error
        )
    return made
