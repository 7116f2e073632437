"""Finding policies by name, and refusing what they do not take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from paceline import policies
from paceline.policies import (
    Parameters,
    PolicyParameterError,
    Preset,
    UnknownPolicyError,
)
from paceline.policies import (
    registry as _registry,
)
from paceline.policies.presets.static_batching import StaticAllocator
from paceline.wire import synchronisation
from paceline_backend.simulator import Scenario
from paceline_backend.simulator.scenario import ScenarioError


def test_presets_that_balance_by_size_and_speed() -> None:
    balance = {name for name in policies.names() if policies.make(name).criteria.by_cost_and_speed}
    assert balance == {"chronica", "paceline", "paceline-relaxed"}
    assert policies.make("ad-psgd", {"batches": "paceline"}).criteria.by_cost_and_speed
    assert not policies.make("paceline-relaxed", {"batches": "boa"}).criteria.by_cost_and_speed


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


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("sata", {"tolerance": float("nan")}, "nan.*of type number at least 0 and at most 1"),
        ("sata", {"tolerance": True}, "True is not legal for sata"),
        ("sata", {"tolerance": "0.1"}, "'0.1' is not legal for sata"),
        ("sata", {"every_steps": 2**70}, "1180591620717411303424 is not legal for sata"),
        ("static-batching", {"capacity": [1, float("nan")]}, "nan.*a list, each item of type numb"),
        ("static-batching", {"capacity": [1, True]}, "True.*above 0 and at most 1e\\+24"),
        ("static-batching", {"capacity": "12"}, "'12' is not legal for static-batching"),
        ("static-batching", {"capacity": [1, 2, 3]}, "3 values given, but the run has 2 ranks"),
    ],
)
def test_what_is_nearly_legal_is_refused(name: str, parameters: dict[str, Any], says: str) -> None:
    (field,) = parameters
    with pytest.raises(PolicyParameterError, match=rf"parameters\.{field}: .*{says}"):
        policies.make(name, parameters, world=2)


def test_a_list_for_the_runs_ranks_is_taken() -> None:
    for given in ((1, 2), [1.0, 2.0]):
        made = policies.make("static-batching", {"capacity": given}, world=2)
        assert made.allocator == StaticAllocator((1.0, 2.0))
    assert policies.make("static-batching", world=2).allocator == StaticAllocator()


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Adds entry points of other packages; a preset is the object that one gives."""
    others: dict[str, Preset[Any]] = {}
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda entry: others.get(entry.name) or load(entry))

    def add(*presets: Preset[Any]) -> None:
        others.update((preset.name, preset) for preset in presets)
        known = list(entry_points(group=_registry.GROUP))
        known += [EntryPoint(name, "somewhere:preset", _registry.GROUP) for name in others]
        monkeypatch.setattr(_registry, "entry_points", lambda group: known)
        _registry._presets.cache_clear()

    yield add
    _registry._presets.cache_clear()


def test_a_package_that_is_broken_or_takes_a_name_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = _registry.GROUP
    entries = [
        EntryPoint("bsp", "json:dumps", group),
        EntryPoint("missing", "no_such_package:preset", group),
        EntryPoint("other", "paceline.policies.presets.sata:preset", group),
        EntryPoint("bsp", "paceline.policies.presets.bsp:preset", group),
    ]
    monkeypatch.setattr(_registry, "entry_points", lambda group: entries)
    _registry._presets.cache_clear()
    try:
        assert policies.names() == ["bsp"]
        assert policies.make("bsp").name == "bsp"
    finally:
        _registry._presets.cache_clear()
    assert "bsp = json:dumps ignored: another policy has this name" in caplog.text
    assert "missing = no_such_package:preset ignored: it cannot be loaded" in caplog.text
    assert "No module named 'no_such_package'" in caplog.text
    assert "other = paceline.policies.presets.sata:preset ignored: it is not" in caplog.text


class WithoutDefault(Parameters, frozen=True, kw_only=True):
    needed: int
    level: int = 1


class Unresolved(Parameters, frozen=True, kw_only=True):
    k: NoSuchType = 1  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize(
    ("kind", "says"),
    [(Unresolved, "NoSuchType"), (WithoutDefault, "missing required field `needed`")],
)
def test_a_preset_whose_parameters_cannot_be_read_is_left_out(
    register: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    kind: type[Parameters],
    says: str,
) -> None:
    register(replace(policies.get("bsp"), name="broken", parameters=kind))
    assert "broken" not in policies.names() and "bsp" in policies.names()
    assert "broken = somewhere:preset ignored: it cannot be loaded" in caplog.text
    assert says in caplog.text


class Span(Parameters, frozen=True, kw_only=True):
    low: Annotated[int, Meta(description="The least.")] = 0
    high: Annotated[int, Meta(description="The most.")] = 5

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError("low is above high")


def test_a_check_of_several_values_sees_all_of_them(register: Callable[..., None]) -> None:
    register(Preset("span", "s", "s", lambda _: policies.make("bsp"), Span))
    policies.make("span", {"low": 8, "high": 9})
    with pytest.raises(PolicyParameterError, match=r"parameters: .*span: low is above high"):
        policies.make("span", {"low": 8})


def test_defaults_are_legal_and_described() -> None:
    for name in policies.names():
        schemas = policies.properties(policies.get(name).parameters)
        policies.make(name, {key: schema["default"] for key, schema in schemas.items()})
        assert all(schema["description"] and schema["type"] for schema in schemas.values())
        assert msgspec.json.decode(msgspec.json.encode(schemas)) == schemas


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


def test_batches_of_a_preset_from_elsewhere_can_be_combined(register: Callable[..., None]) -> None:
    register(replace(policies.get("bsp"), name="other", combines=True))
    batches = policies.properties(policies.get("rna").parameters)["batches"]
    assert batches == policies.properties(policies.get("ssp").parameters)["batches"]
    choices = batches["enum"]
    assert choices[0] == "bsp" and "other" in choices and "rna" not in choices
    made = policies.make("rna", {"batches": "other"})
    assert (made.name, made.synchroniser.name) == ("rna", "partial")
    with pytest.raises(PolicyParameterError, match=r"parameters\.batches: 'ssp'.*one of 'bsp'"):
        policies.make("rna", {"batches": "ssp"})


class Bounded(Parameters, frozen=True, kw_only=True):
    share: Annotated[float, Meta(ge=0, lt=1, description="Below all.")] = 0.0
    level: Annotated[Literal[4, 2], Meta(description="How far.")] = 2


def test_bounds_and_choices_are_in_the_schema_and_in_refusals(
    register: Callable[..., None],
) -> None:
    register(Preset("bounded", "s", "s", lambda _: policies.make("bsp"), Bounded))
    schemas = policies.properties(Bounded)
    assert schemas["level"] == {
        "type": "integer",
        "enum": [4, 2],
        "default": 2,
        "description": "How far.",
    }
    assert schemas["share"]["exclusiveMaximum"] == 1
    with pytest.raises(
        PolicyParameterError, match=r"share: 1 .*type number at least 0 and below 1$"
    ):
        policies.make("bounded", {"share": 1})
    for level in (3, True, "4", 4.0):
        with pytest.raises(PolicyParameterError, match=r"parameters\.level: .* one of 4, 2$"):
            policies.make("bounded", {"level": level})


def test_diloco_keeps_its_rules_without_overlap_and_bounds_it_by_the_parts() -> None:
    plain, mixed = policies.make("diloco"), policies.make("diloco", {"mix": 0.9})
    assert plain.synchroniser == mixed.synchroniser
    assert b"overlap" not in msgspec.json.encode(plain.synchroniser)
    given = {"every": 10, "parts": 4, "overlap": 99}
    rules = policies.make("diloco", given).synchroniser.parameters  # type: ignore[union-attr]
    assert (rules.overlap, rules.keep) == (2, 0.5)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="overlap: 3; give 2 or less"):
        synchronisation.AveragingRules(every=10, parts=4, overlap=3)
