"""Warnings before a switch: which preset is warned of, of what, under which conditions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import policies
from paceline.core.cost import SUM, Cost
from paceline.policies.base import Floats, Models
from paceline.wire import RankDevice
from paceline_backend.insight.fitness import HARM, Conditions, Fitness

PADDED, QUADRATIC = Cost(padded=True), Cost(kappa=0.05)


def lengths(kind: str, samples: int = 4096) -> Floats:
    rng = np.random.default_rng(0)
    if kind == "bimodal":
        return np.where(rng.random(samples) < 0.1, 1000.0, 50.0)
    if kind == "lognormal":
        return rng.lognormal(4, 1, samples)
    return np.full(samples, 100.0)


def fitness(
    kind: str, *, cost: Cost = SUM, local: int = 8, factors: tuple[float, ...] = (1.0,) * 4
) -> Fitness:
    world = len(factors)
    models = Models(np.array(factors) * 1e-4, np.zeros(world), np.full(world, 1e-3), cost=cost)
    equal = [RankDevice("cpu", "Xeon", 4, 1 << 34)] * world
    return Fitness(Conditions(models, lengths(kind), world * local, devices=equal))


def words(of: Fitness, preset: str, **parameters: Any) -> list[str]:
    """What is said besides harm; without trials."""
    return [caution.words for caution in of.cautions(preset, parameters, ratio=1.0)]


def harm(of: Fitness, preset: str, **parameters: Any) -> list[str]:
    return [each.words for each in of.cautions(preset, parameters) if each.harm]


HALF_SLOW = (1.0, 1.0, 2.0, 2.0)
HARMFUL: list[tuple[str, dict[str, Any], Fitness, str]] = [
    ("chronica", {}, fitness("bimodal", cost=PADDED), "batches are padded"),
    (
        "paceline",
        {"cost": "padded"},
        fitness("bimodal", cost=QUADRATIC, local=16),
        "the sum of their",
    ),
    ("chronica", {}, fitness("bimodal", cost=Cost(0.05, padded=True)), "grows faster"),
    ("sata", {"every_steps": 2}, fitness("lognormal"), "ranks that got long samples"),
    (
        "static-batching",
        {"capacity": [3.0, 1.0] * 2},
        fitness("constant"),
        "capacity does not match",
    ),
]
HARMLESS: list[tuple[str, dict[str, Any], Fitness]] = [
    ("bsp", {}, fitness("bimodal", cost=PADDED)),
    ("paceline", {}, fitness("lognormal", cost=QUADRATIC, factors=HALF_SLOW)),
    ("chronica", {}, fitness("lognormal", factors=HALF_SLOW)),
    ("lbb", {}, fitness("constant", factors=HALF_SLOW)),
    ("rna", {}, fitness("lognormal")),
]


@pytest.mark.parametrize(("preset", "parameters", "of", "cause"), HARMFUL)
def test_harm_is_said_with_its_cause(
    preset: str, parameters: dict[str, Any], of: Fitness, cause: str
) -> None:
    first, *others = of.cautions(preset, parameters)
    assert first.harm  # which comes first
    assert first.words.startswith(f"{preset} would take about ")
    assert cause in first.words
    assert not any(caution.harm for caution in others)


@pytest.mark.parametrize(("preset", "parameters", "of"), HARMLESS)
def test_no_harm_is_said_of_what_suits(
    preset: str, parameters: dict[str, Any], of: Fitness
) -> None:
    assert harm(of, preset, **parameters) == []


def test_what_a_preset_changes() -> None:
    of = fitness("constant")
    assert words(of, "bsp") == words(of, "paceline") == words(of, "sata") == []
    assert "other samples share a global batch" in words(of, "paceline", mode="free")[0]
    assert "other samples share a global batch" in words(of, "chronica")[0]
    assert "changes the training" in words(of, "rna")[0]
    assert "changes the training" in words(of, "local-sgd", batches="paceline")[0]


def test_sizes_that_decide_a_step() -> None:
    """Presets of counts choose how many, and not which: sizes are noise to them."""
    for preset in ("sata", "lbb", "boa", "dynamic-batching", "static-batching"):
        assert any("does not look at sizes" in said for said in words(fitness("lognormal"), preset))
        assert words(fitness("constant"), preset) == []
    levelled = words(fitness("lognormal"), "sata", which="levelled")
    assert not any("does not look at sizes" in said for said in levelled)


def test_too_few_samples_to_balance_by_counts() -> None:
    factors = (1.0, 1.5, 1.5, 1.5)
    few = fitness("constant", local=1, factors=factors)
    many = fitness("constant", local=64, factors=factors)
    assert any("can hardly balance" in said for said in words(few, "boa"))
    assert not any("can hardly balance" in said for said in words(many, "boa"))
    assert words(few, "paceline") == []


def test_one_sample_a_rank_does_not_show_padding() -> None:
    single, several = (words(fitness("bimodal", local=n), "chronica") for n in (1, 2))
    assert any("not known whether batches are padded" in said for said in single)
    assert not any("not known whether batches are padded" in said for said in several)


def test_a_forecast_stands_in_for_the_trials() -> None:
    of = fitness("constant")
    assert [each.harm for each in of.cautions("sata", {}, 1.3)] == [True]
    assert of.cautions("sata", {}, HARM) == []


def test_many_ranks_take_no_longer() -> None:
    """Of 3,000 ranks a trial takes 32, from the fastest to the slowest."""
    factors = tuple(np.linspace(1, 2, 3_000))
    said = harm(fitness("constant", factors=factors), "static-batching", capacity=[1.0] * 3_000)
    assert said == []


@settings(deadline=None, max_examples=5)
@given(
    kind=st.sampled_from(["constant", "bimodal", "lognormal"]),
    cost=st.sampled_from([SUM, PADDED, QUADRATIC]),
    factors=st.lists(st.floats(1, 4), min_size=2, max_size=5),
    local=st.integers(1, 8),
    preset=st.sampled_from(policies.names()),
)
def test_any_preset_under_any_conditions(
    kind: str, cost: Cost, factors: list[float], local: int, preset: str
) -> None:
    """Each warning is one sentence that names the preset. `bsp` is never warned of."""
    of = fitness(kind, cost=cost, local=local, factors=tuple(factors))
    cautions = of.cautions(preset, {})
    assert all(caution.words.startswith(preset) for caution in cautions)
    assert sorted(cautions, key=lambda each: not each.harm) == cautions
    assert not (preset == "bsp" and cautions)


CPUS = [RankDevice("cpu", "Xeon", cores, 1 << 34) for cores in (2, 2, 1, 1)]


def test_static_batching_is_judged_with_the_capacities_of_the_devices() -> None:
    """Two ranks have half the cores. So it suits ranks half of which are slow, and no others."""
    for factors, harmful in ((HALF_SLOW, False), ((1.0,) * 4, True)):
        of = fitness("constant", factors=factors)
        known = Fitness(replace(of._conditions, devices=CPUS))
        said = harm(known, "static-batching")
        assert ["capacities by cores do not match" in each for each in said] == [True] * harmful
        relaxed = known.cautions("rna", {"batches": "static-batching"}, ratio=1.0)
        assert not any("not known" in caution.words for caution in relaxed)


@pytest.mark.parametrize(
    ("preset", "parameters", "says"),
    [
        ("static-batching", {}, True),
        ("rna", {"batches": "static-batching"}, True),
        ("static-batching", {"capacity": [1.0, 1.0, 1.0, 1.0]}, False),
        ("lbb", {}, False),
    ],
)
def test_equal_batches_for_want_of_capacities_are_said(
    preset: str, parameters: dict[str, Any], says: bool
) -> None:
    of = Fitness(replace(fitness("constant")._conditions, devices=()))
    said = words(of, preset, **parameters)
    assert any("the capacities of their devices are not known" in each for each in said) == says
