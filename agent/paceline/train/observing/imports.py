"""Calls a function as soon as the script has imported a module. Imports no torch itself."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], None]

logger = logging.getLogger(__name__)


class AfterImport(MetaPathFinder):
    """Calls each hook after its module was executed, once.

    Args:
        hooks: by the module's name. The script's import succeeds even if its hook raises.
    """

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)
        self._searches: set[tuple[int, str]] = set()  # that run now: thread, module

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, whose loader then calls the hook.

        Scripts also ask for a spec only to learn whether a module is there.
        """
        search = threading.get_ident(), name
        if name not in self._hooks or search in self._searches:  # a finder may ask all finders
            return None
        self._searches.add(search)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                spec = None if finder is self or find is None else find(name, path, target)
                if spec is not None:
                    self._call_after(spec.loader)
                    return spec  # type: ignore[no-any-return]
        finally:
            self._searches.remove(search)
        return None

    def _call_after(self, loader: Loader | None) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if (hook := self._hooks.pop(module.__name__, None)) is not None:
                called(hook, module)

        loader.exec_module = exec_module  # type: ignore[method-assign,union-attr]


def called(hook: Hook, module: ModuleType) -> None:
    """Calls a hook; its errors go to the log, not into the script."""
    try:
        hook(module)
    except Exception:
        logger.warning("what uses %s is not observed", module.__name__, exc_info=True)
