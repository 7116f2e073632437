"""Finding policies by name, and refusing what they do not take."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from paceline.wire import Synchronisation
from paceline_backend import policies
from paceline_backend.policies import (
    PolicyParameterError,
    UnknownPolicyError,
)
from paceline_backend.policies import (
    registry as _registry,
)
from paceline_backend.simulator import Scenario
from paceline_backend.simulator.scenario import ScenarioError


def test_presets_come_from_entry_points() -> None:
    assert {"bsp", "chronica"} <= set(policies.names())
    for name in policies.names():
        preset = policies.get(name)
        assert preset.name == name
        assert preset.summary and preset.source
        assert policies.make(name).name == name


@pytest.mark.parametrize(
    ("typo", "meant"), [("chronika", "chronica"), ("BSP", "bsp"), ("bps", "bsp"), ("zzz", None)]
)
def test_the_nearest_name_is_suggested(typo: str, meant: str | None) -> None:
    with pytest.raises(UnknownPolicyError, match=f"no policy '{typo}'.*bsp, chronica") as caught:
        policies.get(typo)
    assert caught.value.suggestion == meant
    if meant:
        assert f"did you mean '{meant}'?" in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (
            {"pick": "paper"},
            "parameters.pick: chronica has no such parameter; it takes: ett, picks",
        ),
        ({"ett": "perstep"}, "parameters.ett: 'perstep'.*one of 'per-step', 'per-sample'"),
        ({"ett": ["per-step"]}, "parameters.ett: "),
        ({"window": 3}, "parameters.window: 3.*of type integer at least 4 and at most 64"),
        ({"window": 65}, "parameters.window: 65"),
        ({"window": 8.0}, "parameters.window: 8.0"),
        ({"window": True}, "parameters.window: True"),
        ({"window": None}, "parameters.window: None"),
    ],
)
def test_illegal_parameters_name_the_field_and_what_is_legal(
    parameters: dict[str, Any], says: str
) -> None:
    with pytest.raises(PolicyParameterError, match=says):
        policies.make("chronica", parameters)


def test_a_package_that_is_broken_or_takes_a_name_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = _registry.GROUP
    found = [
        EntryPoint("bsp", "json:dumps", group),
        EntryPoint("missing", "no_such_package:preset", group),
        EntryPoint("other", "paceline_backend.policies.presets.sata:preset", group),
        EntryPoint("bsp", "paceline_backend.policies.presets.bsp:preset", group),
    ]
    monkeypatch.setattr(_registry, "entry_points", lambda group: found)
    _registry._presets.cache_clear()
    try:
        assert policies.names() == ["bsp"]
        assert policies.make("bsp").name == "bsp"
    finally:
        _registry._presets.cache_clear()
    assert "bsp = json:dumps left out: there is another of this name" in caplog.text
    assert "missing = no_such_package:preset left out: it does not load" in caplog.text
    assert "No module named 'no_such_package'" in caplog.text
    assert (
        "other = paceline_backend.policies.presets.sata:preset left out: it is not" in caplog.text
    )


def test_defaults_are_legal_and_described() -> None:
    for name in policies.names():
        parameters = policies.get(name).parameters
        policies.make(name, {key: schema["default"] for key, schema in parameters.items()})
        assert all(schema["description"] for schema in parameters.values())


def test_a_synchroniser_that_ranks_do_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a package's policy is asked for, in a scenario too: not in the middle of a run."""
    made = replace(policies.make("bsp"), name="gossip", synchroniser=Synchronisation("gossip"))
    preset = replace(policies.get("bsp"), name="gossip", make=lambda parameters: made)
    monkeypatch.setattr(_registry, "_presets", lambda: {"gossip": preset})
    says = "policy: gossip: synchroniser 'gossip' is unknown; ranks know: allreduce, averaging, "
    with pytest.raises(ValueError, match=says):
        policies.make("gossip")
    scenario = {"name": "s", "workers": 2, "global_batch": 2, "steps": 1, "policy": "gossip"}
    scenario |= {"sizes": {"distribution": "constant", "mean": 1, "samples": 4}}
    with pytest.raises(ScenarioError, match=says):
        Scenario.of({**scenario, "devices": {"unit_s": 1.0}})


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("hierarchical", {"groups": 5}, "parameters.groups: 5 must be lists of ranks"),
        ("hierarchical", {"groups": [[0], [2]]}, "each of the 2 ranks in one of them"),
        ("averaging", {}, "parameters.every is missing"),
        ("averaging", {"every": 0}, "parameters.every: 0 must be a whole number of at least 1"),
        ("partial", {"staleness": 4, "mean": True}, "one of probes, parts, spare, quorum is"),
        ("partial", {"probes": 2, "staleness": 4}, "parameters.mean is missing"),
        ("partial", {"mean": "yes"}, "parameters.mean: 'yes' must be true or false"),
        ("partial", {"pace": True}, "parameters.pace is unknown; it takes: probes, "),
        ("pairwise", {"every": 1}, "parameters.every is unknown; it takes: none"),
        ("partial", {"x": {1: 2}}, "has the key 1: keys must be strings"),
    ],
)
def test_parameters_that_a_synchroniser_does_not_take_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, parameters: dict[str, Any], says: str
) -> None:
    how = Synchronisation(name, parameters)
    made = replace(policies.make("bsp"), name="odd", synchroniser=how)
    preset = replace(policies.get("bsp"), name="odd", make=lambda parameters: made)
    monkeypatch.setattr(_registry, "_presets", lambda: {"odd": preset})
    with pytest.raises(ValueError, match=re.escape(says)):
        policies.make("odd", world=2)
