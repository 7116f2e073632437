"""Odd values, names and places of reports; wrong meshes and profiles: errors say what to mend."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from support import odd_reports as odd
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(2)
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.stop()


# Metrics


def test_values_are_numbers_or_tensors_without_dimensions(ranks: Ranks) -> None:
    for said in ranks.run(odd.values):
        for name in odd.VALUES:
            assert said[name] == (None, None, None), name
        for name in odd.WRONG:
            of_loss, of_metric, of_evaluation = said[name]
            if name != "tensor with a dimension":  # of a single element: a loss may be one
                assert "session.log: loss" in of_loss, name
            assert "session.log: accuracy" in of_metric, name
            assert "session.evaluated: accuracy" in of_evaluation, name


def test_a_wrong_name_is_named_with_the_rule(ranks: Ranks) -> None:
    for said in ranks.run(odd.names):
        right = ("val/top-5", "a" * 64, "_x")
        assert [said.pop(name) for name in right] == [(None, None)] * 3
        for name, errors in said.items():
            assert all(
                ascii(name) in error and "1 to 64 letters, digits and _ . / -" in error
                for error in errors
            )


def test_where_metrics_are_reported(ranks: Ranks) -> None:
    for said in ranks.run(odd.places):
        for place in ("before the loop", "after the loop", "after close"):
            assert "inside the loop over session.loader()" in said.pop(f"log {place}")
        assert "'loss'" in said.pop("log without a loss")
        assert "give a metric, such as accuracy=0.91" in said.pop("evaluated nothing")
        assert "this session is closed" in said.pop("evaluated after close")
        for wrong in ("-1", "1.5", "'8'", "True"):
            assert said.pop(f"samples={wrong}").split(": ", 1)[1].startswith(f"samples is {wrong}:")
        assert set(said.values()) == {None}, said


def test_a_metric_too_many_is_named(ranks: Ranks) -> None:
    for logged, evaluated in ranks.run(odd.many_names):
        assert logged[:6] == [None] * 6
        assert all("m6_0 would exceed the limit" in said for said in logged[6:7])
        assert evaluated[:32] == [None] * 32
        assert "e32 would exceed the limit: a run has at most 32" in evaluated[32]


# Meshes


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("a word", 'such as mesh["dp"]'),
        ("a number", 'such as mesh["dp"]'),
        ("names", 'such as mesh["dp"]'),
        ("a process group", 'such as mesh["dp"]'),
        ("some ranks", "make one mesh of all ranks"),
        ("another order", "create the mesh with ranks in order"),
        ("another order of groups", "create the mesh with ranks in order"),
        ("on some ranks", "give every rank the same value"),
    ],
)
def test_a_wrong_mesh(four: Ranks, kind: str, says: str) -> None:
    said = [each for each in four.run(odd.mesh, kind) if each is not None]
    assert said
    assert all("mesh" in each and says in each for each in said), said


@pytest.mark.parametrize("kind", ["the data-parallel part", "all ranks"])
def test_a_right_mesh(four: Ranks, kind: str) -> None:
    assert four.run(odd.mesh, kind) == [None] * 4


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"uneven_steps": True}, "mesh and uneven_steps cannot be combined"),
        ({"micro_batches": True, "limits": 4}, "mesh and micro_batches cannot be combined"),
        ({"limits": [4, 4, 4, 4]}, "limits is [4, 4, 4, 4]: give one number, or one for each of 2"),
    ],
)
def test_what_a_mesh_does_not_go_with(four: Ranks, options: dict[str, object], says: str) -> None:
    for said in four.run(partial(odd.mesh, "the data-parallel part", **options)):
        assert says in said


@pytest.mark.parametrize(
    ("what", "says"),
    [("wrap", "call fully_shard(model, mesh=…)"), ("profile", "give Session(limits=…)")],
)
def test_what_groups_refuse_later(four: Ranks, what: str, says: str) -> None:
    for said in four.run(odd.in_a_mesh, what):
        assert says in said


# Profiles


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a loss", "run_batch is tensor("),
        ("None", "run_batch is None: give a function of n"),
        ("steps", "leave optimizer.step() out of run_batch"),
        ("never fits", "memory ran out at the first batch, of 2 samples"),
        ("twice", "call it once, and before the loader's first iteration"),
        ("after training", "call it once, and before the loader's first iteration"),
        ("most 0", "most is 0: it must be at least 1"),
        ("most -4", "most is -4"),
        ("most 2.5", "most is 2.5: it must be a whole number"),
        ("most '8'", "most is '8': it must be a whole number"),
        ("fails on rank 1", "KeyError: 'a column is missing'"),
    ],
)
def test_a_wrong_profile(ranks: Ranks, what: str, says: str) -> None:
    for said in ranks.run(odd.profile, what):
        assert says in said


@pytest.mark.parametrize("what", ["right", "typical", "most 64", "steps another"])
def test_a_right_profile(ranks: Ranks, what: str) -> None:
    assert ranks.run(odd.profile, what) == [None] * 2
