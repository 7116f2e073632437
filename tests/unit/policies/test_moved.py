"""Third parties' policies import old paths for one more release."""

from __future__ import annotations

import importlib
import sys

import pytest

from paceline_backend.policies.moved import MOVED, moved_to


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_path_gives_the_new_module_with_a_warning(old: str) -> None:
    name = f"paceline_backend.policies.{old}"
    new = importlib.import_module(moved_to(old))
    sys.modules.pop(name, None)
    with pytest.warns(FutureWarning, match=f"has moved to {new.__name__}"):
        module = importlib.import_module(name)
    if new.__name__.endswith(".relaxed") and old != "_relaxed":
        assert module.preset.name == old.replace("_", "-")
    else:
        assert module is new
        assert module.__spec__ is not None
        assert module.__spec__.name == new.__name__


def test_a_name_that_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("paceline_backend.policies.no_such_policy")
