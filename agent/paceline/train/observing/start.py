"""Starts observing a process. This module imports torch only after the script has imported it."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

logger = logging.getLogger(__name__)
Hook = Callable[[ModuleType], None]


def watch() -> None:
    """Observe this process from the moment it imports torch."""
    sys.meta_path.insert(0, AfterImport({"torch": begin}))


def begin(_torch: ModuleType | None = None) -> None:
    """Observe this process from now on. Torch must have been imported. Never raises."""
    try:
        from paceline.core.forking import delay_forks
        from paceline.train.observing import patches
        from paceline.train.observing.observer import Observer

        # The script's DataLoader may fork while the observer's threads run.
        delay_forks()
        observer = Observer()
        patches.apply(observer)
        later = patches.later(observer)
        for name in later.keys() & sys.modules.keys():
            called(later.pop(name), sys.modules[name])
        sys.meta_path.insert(0, AfterImport(later))
    except Exception:
        logger.warning("this process is not observed", exc_info=True)


class AfterImport(MetaPathFinder):
    """Finder that calls each hook once, after the hook's module was executed.

    An import succeeds even if its hook raises.
    """

    def __init__(self, hooks: Mapping[str, Hook]) -> None:
        self._hooks = dict(hooks)
        # Searches in progress, each as the thread's identifier and the module's name.
        self._searches: set[tuple[int, str]] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec from another finder, with a loader that also calls the hook.

        The hook runs after the module's execution and not here, because some scripts request a spec
        only to check whether a module is installed.
        """
        search = threading.get_ident(), name
        # Another finder may call all finders, including this one, within the search below.
        if name not in self._hooks or search in self._searches:
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
    """Call a hook; log its errors instead of raising them in the script."""
    try:
        hook(module)
    except Exception:
        logger.warning("code that uses %s is not observed", module.__name__, exc_info=True)
