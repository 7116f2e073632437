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

_POLICIES = "paceline_backend.policies"
_PRESETS = (
    "boa bsp chronica dynamic_batching ep4ddl lbb paceline rna_hierarchical sata static_batching"
)
_RELAXED = "ad_psgd backup_workers eager_sgd flexrr local_sgd n_soft osa rna ssp"
_SOLVERS = "balance compose exchange holdings minmax padded workers"
_RENAMED = {
    "_base": "base",
    "_registry": "registry",
    "linear": "predict.linear",
    "_groups": "predict.groups",
    "counted": "solve.counts",
    "order": "solve.order",
    **{f"_{name}": f"solve.{name}" for name in _SOLVERS.split()},
    "_jit": "jit",
    "_relaxed": "presets.relaxed",
    **{name: f"presets.{name}" for name in _PRESETS.split()},
    **dict.fromkeys(_RELAXED.split(), "presets.relaxed"),
}
MOVED = {
    **{f"{_POLICIES}.{old}": f"{_POLICIES}.{new}" for old, new in _RENAMED.items()},
    f"{_POLICIES}.testing": "paceline_backend.testing.policies",
}


class _Moved(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives the module of the new path for the old one."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(
            f"{spec.name} has moved to {new}; the old path works until the next release",
            FutureWarning,  # Python hides a DeprecationWarning of an imported module
            stacklevel=2,
        )
        module = importlib.import_module(new)
        lacking = _lacking(spec.name)
        if not lacking:
            spec.loader_state = module.__spec__
            return module
        old = ModuleType(spec.name, f"Moved to {new}.")
        public = {name: value for name, value in vars(module).items() if name[:2] != "__"}
        old.__dict__.update({**public, **lacking})
        return old

    def exec_module(self, module: ModuleType) -> None:
        """The module ran when it was imported; it keeps the specification of its new path."""
        if module.__spec__ is not None and module.__spec__.loader_state is not None:
            module.__spec__ = module.__spec__.loader_state


def _lacking(name: str) -> dict[str, object]:
    """The names of the old module that the new one does not have, or has otherwise."""
    from paceline_backend.policies import former  # which imports all presets

    package, _, old = name.rpartition(".")
    return former.NAMES.get(old, {}) if package == _POLICIES else {}


def install() -> None:
    """Lets old import paths find their modules. Calling it again does nothing."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.append(_Moved())
