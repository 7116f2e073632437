"""Registry of backends: the entry-point group ``paceline.backends``, and `AdoptedBackend`."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from paceline.core.errors import PacelineError
from paceline_backend.backends.adopted import AdoptedBackend
from paceline_backend.backends.base import Backend
from paceline_backend.backends.engine import Engine

log = logging.getLogger(__name__)

GROUP = "paceline.backends"


class UnknownBackendError(PacelineError):
    """No backend has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"backend: no backend {name!a}; known: {', '.join(names())}")


def names() -> list[str]:
    """Return the sorted names of the backends with which a run may be launched over the API."""
    return sorted(_backends().keys() - {AdoptedBackend.name})


def get(name: str) -> Backend:
    """Return the backend of this name, or raise `UnknownBackendError`."""
    try:
        return _backends()[name]
    except KeyError:
        raise UnknownBackendError(name) from None


def engines() -> dict[str, Engine]:
    """Return the backends that are engines, by name."""
    return {name: each for name, each in _backends().items() if isinstance(each, Engine)}


def engine(name: str | None) -> Engine | None:
    """Return the engine of this name, or None if no backend of this name is an engine."""
    return engines().get(name or "")


def planned() -> list[str]:
    """Return the names of the backends whose runs are planned by a controller."""
    return [name for name, backend in _backends().items() if not backend.plans_itself]


def plans_itself(name: str | None) -> bool:
    """Return True if the backend plans its runs itself; False for an unknown name."""
    backend = _backends().get(name or "")
    return backend is not None and backend.plans_itself


@cache
def _backends() -> dict[str, Backend]:
    backends: dict[str, Backend] = {AdoptedBackend.name: AdoptedBackend()}
    for entry in sorted(entry_points(group=GROUP), key=_is_foreign):
        if entry.name in backends:
            _left_out(entry, "another backend has this name")
        elif (backend := _load(entry)) is not None:
            backends[entry.name] = backend
    return backends


def _load(entry: EntryPoint) -> Backend | None:
    try:
        backend: Backend = entry.load()()
        if backend.name != entry.name:
            _left_out(entry, f"its name is {backend.name!a}")
            return None
        # This call raises an error unless each option has a default.
        backend.options()
    # One broken package must not stop every run.
    except Exception:
        _left_out(entry, "it failed to load", exc_info=True)
        return None
    return backend


def _left_out(entry: EntryPoint, why: str, exc_info: bool = False) -> None:
    log.error("backend %s = %s is ignored: %s", entry.name, entry.value, why, exc_info=exc_info)


def _is_foreign(entry: EntryPoint) -> bool:
    return not entry.module.startswith("paceline_backend.")
