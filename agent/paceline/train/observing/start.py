"""Starts observing a process. It imports torch only after the script has done so."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

from paceline.train.observing.imports import AfterImport, called

logger = logging.getLogger(__name__)


def watch() -> None:
    """Observe this process from the moment it imports torch."""
    sys.meta_path.insert(0, AfterImport({"torch": begin}))


def begin(_torch: ModuleType | None = None) -> None:
    """Observe this process from now on, with torch imported. Never raises."""
    try:
        from paceline.train.observing import losses, patches
        from paceline.train.observing.observer import Observer

        observer = Observer()
        patches.apply(observer)
        later = {**patches.later(observer), **losses.later(observer)}
        for name in later.keys() & sys.modules.keys():
            called(later.pop(name), sys.modules[name])
        sys.meta_path.insert(0, AfterImport(later))
    except Exception:
        logger.warning("this process is not observed", exc_info=True)
