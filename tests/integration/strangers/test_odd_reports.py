"""Odd values and places of reports, and wrong profiles: errors say what to mend."""

from __future__ import annotations

import pytest

from support import odd_reports as odd
from support.ranks import Ranks

pytestmark = pytest.mark.ranks


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


# Meshes


def test_a_mesh_of_all_ranks(ranks: Ranks) -> None:
    assert ranks.run(odd.mesh_of_all) == [None, None]


# Profiles


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a loss", "run_batch is tensor("),
        ("None", "run_batch is None: give a function of n"),
        ("steps", "leave optimizer.step() out of run_batch"),
        ("most 0", "most is 0: it must be at least 1"),
        ("most 2.5", "most is 2.5: it must be a whole number"),
    ],
)
def test_a_wrong_profile(ranks: Ranks, what: str, says: str) -> None:
    for said in ranks.run(odd.profile, what):
        assert says in said


@pytest.mark.parametrize("what", ["most 64", "steps another"])
def test_a_right_profile(ranks: Ranks, what: str) -> None:
    assert ranks.run(odd.profile, what) == [None] * 2
