"""Finding policies by name, and refusing what they do not take."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest

from paceline.wire import Synchronisation, synchronisation
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
    entries = [
        EntryPoint("bsp", "json:dumps", group),
        EntryPoint("missing", "no_such_package:preset", group),
        EntryPoint("other", "paceline_backend.policies.presets.sata:preset", group),
        EntryPoint("bsp", "paceline_backend.policies.presets.bsp:preset", group),
    ]
    monkeypatch.setattr(_registry, "entry_points", lambda group: entries)
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


BAD = synchronisation.Partial(synchronisation.PartialRules(probes=0, staleness=4, mean=True))


def test_a_synchroniser_that_ranks_cannot_follow_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a package's policy is asked for, in a scenario too: not in the middle of a run."""
    made = replace(policies.make("bsp"), name="gossip", synchroniser=BAD)
    preset = replace(policies.get("bsp"), name="gossip", make=lambda parameters: made)
    monkeypatch.setattr(_registry, "_presets", lambda: {"gossip": preset})
    says = "policy: gossip: synchroniser 'partial': parameters.probes: expected `int` >= 1"
    with pytest.raises(ValueError, match=says):
        policies.make("gossip")
    scenario = {"name": "s", "workers": 2, "global_batch": 2, "steps": 1, "policy": "gossip"}
    scenario |= {"sizes": {"distribution": "constant", "mean": 1, "samples": 4}}
    with pytest.raises(ScenarioError, match=says):
        Scenario.of({**scenario, "devices": {"unit_s": 1.0}})


def test_groups_are_those_of_the_runs_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {"groups": [[0, 1], [2]], "every": 4, "probes": 2, "staleness": 4, "mean": True}
    pairs = synchronisation.convert("hierarchical", rules)
    made = replace(policies.make("bsp"), name="pairs", synchroniser=pairs)
    preset = replace(policies.get("bsp"), name="pairs", make=lambda parameters: made)
    monkeypatch.setattr(_registry, "_presets", lambda: {"pairs": preset})
    assert policies.make("pairs", world=3) == policies.make("pairs") == made
    with pytest.raises(ValueError, match=r"policy: pairs: .*\[\[0, 1\], \[2\]\].* of 4 ranks"):
        policies.make("pairs", world=4)


def test_policies_written_for_the_released_wire_work_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match="AllReduce, Averaging, Pairwise"):
        made = Synchronisation("partial", {"probes": 2, "staleness": 4, "mean": True})
    assert made == policies.make("rna").synchroniser
    with (
        pytest.warns(DeprecationWarning),
        pytest.raises(ValueError, match=r"'partial': parameters.probe: is not a known field"),
    ):
        Synchronisation("partial", {"probe": 2, "staleness": 4, "mean": True})


def test_batches_of_a_preset_from_elsewhere_can_be_combined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = replace(policies.get("bsp"), name="other", combines=True)
    entries = [
        *entry_points(group=_registry.GROUP),
        EntryPoint("other", "somewhere:preset", _registry.GROUP),
    ]
    real = EntryPoint.load
    monkeypatch.setattr(_registry, "entry_points", lambda group: entries)
    monkeypatch.setattr(EntryPoint, "load", lambda e: other if e.name == "other" else real(e))
    _registry._presets.cache_clear()
    try:
        choices = policies.get("rna").parameters["batches"]["enum"]
        assert choices == policies.get("adaptive").parameters["batches"]["enum"]
        assert choices[0] == "bsp" and "other" in choices and "rna" not in choices
        made = policies.make("rna", {"batches": "other"})
        assert (made.name, made.synchroniser.name) == ("rna", "partial")
        with pytest.raises(PolicyParameterError, match=r"parameters\.batches: 'ssp'.*one of 'bsp'"):
            policies.make("rna", {"batches": "ssp"})
    finally:
        _registry._presets.cache_clear()
