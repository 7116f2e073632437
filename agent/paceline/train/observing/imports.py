"""Calls a function as soon as the script has imported a module. Imports no torch itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Calls each hook after its module was executed, once.

    Args:
        hooks: by the module's name. A hook may raise nothing.
    """

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, whose loader then calls the hook."""
        hook = self._hooks.pop(name, None)
        if hook is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                _call_after(spec.loader, hook)
                return spec  # type: ignore[no-any-return]
        return None


def _call_after(loader: Loader | None, hook: Hook) -> None:
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module: ModuleType) -> None:
        execute(module)
        hook(module)

    loader.exec_module = exec_module  # type: ignore[method-assign,union-attr]
