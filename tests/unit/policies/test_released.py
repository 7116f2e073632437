"""Policies written for the release before: old paths, and parameters as JSON Schema."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from paceline_backend import policies
from paceline_backend.policies import PolicyParameterError
from paceline_backend.policies.moved import MOVED
from paceline_backend.policies.parameters import convert, properties
from paceline_backend.testing import check_policy

FOLDER = Path(__file__).parent / "released"


def load(name: str) -> tuple[ModuleType, list[str]]:
    """A module of the folder, imported for the first time, and its warnings."""
    for old in (*MOVED, "paceline.cost"):
        sys.modules.pop(old, None)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    assert {warning.category for warning in caught} == {FutureWarning}
    return module, [str(warning.message) for warning in caught]


@pytest.fixture
def thirds() -> ModuleType:
    return load("paceline_thirds")[0]


def test_the_example_of_the_release_keeps_the_contract_and_says_how_to_move() -> None:
    module, says = load("paceline_curriculum")
    assert "policies.linear has moved to paceline_backend.policies.predict.linear" in says[0]
    assert "preset curriculum: parameters as a mapping of JSON Schema work until" in says[1]
    assert "derived from paceline_backend.policies.Parameters" in says[1]
    assert properties(module.preset.parameters)["disorder"] == {
        "type": "number",
        "minimum": 0.0,
        "maximum": 1.0,
        "default": 0.1,
        "description": "How much chance has a say in the order: 0 none, 1 as much as size.",
    }
    check_policy(module.preset, cases=10)


def test_the_warning_points_at_the_file_that_makes_the_preset() -> None:
    with pytest.warns(FutureWarning, match="preset x: parameters as a mapping") as caught:
        policies.Preset("x", "s", "s", lambda _: policies.make("bsp"), {})  # type: ignore[arg-type, var-annotated]
    assert [warning.filename for warning in caught] == [__file__]


def test_former_names_work(thirds: ModuleType) -> None:
    check_policy(thirds.preset, cases=10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of `Synchronisation`
        check_policy(thirds.gossip_preset, cases=5)


def test_make_gets_a_mapping(thirds: ModuleType) -> None:
    preset = thirds.preset
    preset.make(convert("thirds", preset.parameters, {"alpha": 0.25, "weights": [1, 2]}, world=2))
    (given,) = thirds.GIVEN
    assert given == {
        "alpha": 0.25,
        "level": 1,
        "sure": False,
        "weights": [1, 2],
        "batches": "mine",
        "cost": "auto",
        "which": "order",
        "window": 64,
        "steps": 1,
        "letters": ["a"],
    }
    assert type(given["steps"]) is type(given["level"]) is int
    preset.make(given)  # as its own tests may do
    assert thirds.GIVEN[1] is given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"beta": 1}, "parameters.beta: thirds has no such parameter; it takes: alpha, level"),
        ({"alpha": 0}, "parameters.alpha: 0 is not legal for thirds; .*above 0 and at most 1"),
        ({"alpha": float("nan")}, "parameters.alpha: nan"),
        ({"alpha": True}, "parameters.alpha: True"),
        ({"level": 0.5}, r"parameters.level: 0.5 .* one of 0\.1, 1"),
        ({"sure": 1}, "parameters.sure: 1 .* of type boolean"),
        ({"window": 8.0}, "parameters.window: 8.0 .* integer at least 4 and at most 64"),
        ({"cost": "most"}, "parameters.cost: 'most' .* one of 'auto', 'sum', 'padded'"),
        ({"steps": 0}, "parameters.steps: 0 .* of type integer at least 0.5"),
        ({"letters": ["a", "c"]}, "parameters.letters: .* a list, each item one of 'a', 'b'"),
        ({"weights": [1, 0]}, "parameters.weights: .* a list, each item of type number above 0"),
        ({"weights": [1.0, 2.0]}, "parameters.weights: 2 values given, but the run has 3 ranks"),
    ],
)
def test_illegal_values_are_refused(thirds: ModuleType, given: Any, says: str) -> None:
    with pytest.raises(PolicyParameterError, match=says):
        convert("thirds", thirds.preset.parameters, given, world=3)


def test_legal_values_are_taken(thirds: ModuleType) -> None:
    given = {"alpha": 1, "level": 0.1, "sure": True, "batches": "x", "weights": (3, 1.5)}
    taken = msgspec.structs.asdict(convert("thirds", thirds.preset.parameters, given, world=2))
    assert taken | given == taken | {"weights": (3, 1.5)}


def test_a_parameters_schema_is_the_third_partys(thirds: ModuleType) -> None:
    schemas = properties(thirds.preset.parameters)
    assert schemas["letters"]["items"] == {"type": "string", "enum": ["a", "b"]}
    assert schemas["level"] == {
        "type": "number",
        "enum": [0.1, 1],
        "default": 1,
        "description": "Of no effect.",
    }


def test_an_illegal_default_does_not_keep_others_from_being_set() -> None:
    schemas = {
        "low": {"type": "integer", "minimum": 5, "default": 0, "description": "d"},
        "high": {"type": "integer", "default": 9, "description": "d"},
    }
    with pytest.warns(FutureWarning):
        preset: Any = policies.Preset("x", "s", "s", lambda _: policies.make("bsp"), schemas)  # type: ignore[arg-type]
    assert convert("x", preset.parameters, {"high": 3}).high == 3
    for low in (1, 0):
        with pytest.raises(PolicyParameterError, match=rf"parameters\.low: {low} "):
            convert("x", preset.parameters, {"low": low})
