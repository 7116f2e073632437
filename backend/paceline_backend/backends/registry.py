"""Which backends there are: those in the entry-point group ``paceline.backends``, and `Adopted`."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from paceline.core.errors import PacelineError
from paceline_backend.backends.adopted import Adopted
from paceline_backend.backends.base import Backend
from paceline_backend.backends.engine import Engine

log = logging.getLogger(__name__)

GROUP = "paceline.backends"


class UnknownBackendError(PacelineError):
    """No backend has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"backend: no backend {name!a}; known: {', '.join(names())}")


def names() -> list[str]:
    """The backends that somebody may ask for, sorted: those in the group."""
    return sorted(_backends().keys() - {Adopted.name})


def get(name: str) -> Backend:
    """The backend of this name.

    Raises:
        UnknownBackendError: there is none.
    """
    try:
        return _backends()[name]
    except KeyError:
        raise UnknownBackendError(name) from None


def engines() -> dict[str, Engine]:
    """The backends that are engines, by name."""
    return {name: each for name, each in _backends().items() if isinstance(each, Engine)}


def engine(name: str | None) -> Engine | None:
    """The engine of this name; None if it is no engine, or unknown."""
    return engines().get(name or "")


def planned() -> list[str]:
    """The names of the backends whose runs controllers plan."""
    return [name for name, backend in _backends().items() if not backend.plans_itself]


def plans_itself(name: str | None) -> bool:
    """Whether runs of this backend are planned by the backend; False for an unknown name."""
    backend = _backends().get(name or "")
    return backend is not None and backend.plans_itself


@cache
def _backends() -> dict[str, Backend]:
    backends: dict[str, Backend] = {Adopted.name: Adopted()}
    for entry in sorted(entry_points(group=GROUP), key=_is_foreign):
        if entry.name in backends:
            _left_out(entry, "there is another of this name")
        elif (backend := _load(entry)) is not None:
            backends[entry.name] = backend
    return backends


def _load(entry: EntryPoint) -> Backend | None:
    """The entry point's backend; None, and an error in the log, if there is no usable one."""
    try:
        backend: Backend = entry.load()()
        if backend.name != entry.name:
            _left_out(entry, f"it calls itself {backend.name!a}")
            return None
        backend.options()  # each option has a default
    except Exception:  # one broken package must not stop every run
        _left_out(entry, "it does not load", exc_info=True)
        return None
    return backend


def _left_out(entry: EntryPoint, why: str, exc_info: bool = False) -> None:
    log.error("backend %s = %s left out: %s", entry.name, entry.value, why, exc_info=exc_info)


def _is_foreign(entry: EntryPoint) -> bool:
    return not entry.module.startswith("paceline_backend.")
