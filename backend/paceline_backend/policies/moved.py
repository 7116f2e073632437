"""Old import paths of policies: they work for one more release, with a warning.

Third parties' packages import `paceline_backend.policies.linear`, `._base` and their like. Remove
this file, and the call of `install`, with the release after 0.2.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

_PACKAGE = "paceline_backend.policies"
_PRESETS = (
    "adaptive boa bsp chronica dynamic_batching ep4ddl lbb paceline rna_hierarchical sata "
    "static_batching"
)
_RELAXED = "ad_psgd backup_workers eager_sgd flexrr local_sgd n_soft osa rna ssp"
MOVED = {
    "_base": "base",
    "_registry": "registry",
    "linear": "predict.linear",
    "_groups": "predict.groups",
    "counted": "solve.counts",
    "order": "solve.order",
    **{f"_{name}": f"solve.{name}" for name in ("balance", "compose", "exchange", "holdings")},
    **{f"_{name}": f"solve.{name}" for name in ("minmax", "padded", "workers")},
    "_jit": "jit",
    "_relaxed": "presets.relaxed",
    **{name: f"presets.{name}" for name in _PRESETS.split()},
    **dict.fromkeys(_RELAXED.split(), "presets.relaxed"),
    "testing": "..testing.policies",
}


def moved_to(old: str) -> str:
    """The full name of the module that was `paceline_backend.policies.{old}`."""
    new = MOVED[old]
    return f"paceline_backend.{new[2:]}" if new.startswith("..") else f"{_PACKAGE}.{new}"


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the module of the new path for the old one."""

    _spec: importlib.machinery.ModuleSpec | None = None  # that the module in hand shall have

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, _, old = name.rpartition(".")
        if package != _PACKAGE or old not in MOVED:
            return None
        return importlib.util.spec_from_loader(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        old = spec.name.rpartition(".")[2]
        new = moved_to(old)
        warnings.warn(
            f"{spec.name} has moved to {new}; the old path works until the next release",
            FutureWarning,  # Python hides a DeprecationWarning of an imported module
            stacklevel=2,
        )
        module = importlib.import_module(new)
        if old not in _RELAXED.split():
            self._spec = module.__spec__
            return module
        # These were modules of their own, with a `preset`; now they are lines of one table.
        single = ModuleType(spec.name, f"Moved to {new}.")
        single.__dict__["preset"] = getattr(module, old)
        self._spec = spec
        return single

    def exec_module(self, module: ModuleType) -> None:
        """The module ran when it was imported; it keeps the specification of its new path."""
        module.__spec__ = self._spec


def install() -> None:
    """Lets old import paths find their modules. Calling it again does nothing."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
