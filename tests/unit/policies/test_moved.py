"""Third parties' policies import old paths, and names that are gone, for one more release."""

from __future__ import annotations

import importlib
import sys

import pytest

from paceline_backend.policies import moved
from paceline_backend.policies.former import NAMES
from paceline_backend.policies.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_gives_the_new_module_with_a_warning(old: str) -> None:
    new = importlib.import_module(MOVED[old])
    sys.modules.pop(old, None)
    with pytest.warns(FutureWarning, match=f"has moved to {new.__name__}"):
        module = importlib.import_module(old)
    former = NAMES.get(old.rpartition(".")[2], {})
    assert module is new or former
    for name, value in {**vars(new), **former}.items():
        assert name.startswith("__") or getattr(module, name) is value
    assert module.__spec__ is not None
    assert module.__spec__.name == (old if former else new.__name__)


@pytest.mark.parametrize("name", ["bsp", "chronica", "rna", "ssp", "rna_hierarchical"])
def test_an_old_module_of_a_preset_makes_its_policy_from_a_mapping(name: str) -> None:
    sys.modules.pop(old := f"paceline_backend.policies.{name}", None)
    with pytest.warns(FutureWarning, match="has moved"):
        module = importlib.import_module(old)
    assert module.preset.name == name.replace("_", "-")
    assert module.make({}).name == module.preset.name


@pytest.mark.parametrize("name", ["cost", "dealing", "emulation"])
def test_an_old_path_of_the_agent_works_without_the_control_plane(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    finders = [finder for finder in sys.meta_path if not isinstance(finder, moved._Moved)]
    monkeypatch.setattr(sys, "meta_path", finders)
    sys.modules.pop(f"paceline.{name}", None)
    with pytest.warns(FutureWarning, match=f"{name} has moved to paceline.core.{name}") as caught:
        old = importlib.import_module(f"paceline.{name}")
    assert caught[0].filename == importlib.__file__, "the warning points at who imports"
    new = importlib.import_module(f"paceline.core.{name}")
    defined = {key: getattr(value, "__module__", "") for key, value in vars(new).items()}
    public = [key for key in defined if defined[key] == new.__name__ and not key.startswith("_")]
    assert public and all(getattr(old, key) is getattr(new, key) for key in public)


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("paceline_backend.policies.no_such_policy")
