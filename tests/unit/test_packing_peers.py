"""NeMo-RL's packing, as the benchmark of tokens has it: against its source's own examples."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PACKERS = [
    "concatenative",
    "first_fit_decreasing",
    "first_fit_shuffle",
    "modified_first_fit_decreasing",
]
LENGTHS = [4, 1, 3, 2, 1, 3, 4, 5]


@pytest.fixture(scope="module")
def packing() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("packing")


@pytest.mark.parametrize(
    ("capacity", "bins"),
    [(5, [[0, 1], [2, 3], [4, 5], [6], [7]]), (8, [[0, 1, 2], [3, 4, 5], [6], [7]])],
)
def test_samples_are_put_end_to_end(packing: Any, capacity: int, bins: list[list[int]]) -> None:
    assert packing.concatenative(LENGTHS, capacity) == bins


def test_phases_of_modified_first_fit_decreasing(packing: Any) -> None:
    # Of 60: large 40, 35, 31; medium 21 to 30; small 11 to 20; tiny up to 10.
    sizes = [40, 35, 31, 25, 12, 17, 11, 5, 3, 20]
    bins = packing.modified_first_fit_decreasing(sizes, 60)
    # 35 gets the medium 25. Then, from the last bin: 31 gets the smallest small, 11, and the
    # largest that fits beside it, 17; 40 has no room for two. Then 40 is filled with 20.
    assert bins == [[0, 9], [1, 3], [2, 6, 5], [4, 7, 8]]


def test_what_is_left_goes_to_the_emptiest_bin(packing: Any) -> None:
    sizes = [30, 30, 29, 20, 10]
    assert packing.modified_first_fit_decreasing(sizes, 60) == [[2, 3, 4], [0, 1]]


def test_each_rank_gets_as_many_bins(packing: Any) -> None:
    bins = [[0, 1, 2], [3], [4, 5]]
    assert packing.in_multiples(bins, 3) == bins
    assert packing.in_multiples(bins, 5) == [[0], [3], [4, 5], [2], [1]]
    assert packing.in_multiples([[0, 1]], 3) == [[0], [1]]


@pytest.mark.parametrize("name", PACKERS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 60), min_size=8, max_size=60), world=st.integers(1, 8))
def test_each_sample_once_within_the_capacity(
    packing: Any, name: str, lengths: list[int], world: int
) -> None:
    packer = getattr(packing, name)
    bins = packer(lengths, 60)
    assert sorted(place for each in bins for place in each) == list(range(len(lengths)))
    assert all(0 < sum(lengths[place] for place in each) <= 60 for each in bins)
    if len(lengths) >= -(-max(len(bins), world) // world) * world:
        assert len(packing.in_multiples(bins, world)) % world == 0
    batch = np.arange(len(lengths))[::-1]
    parts = packing.packed(batch, np.array(lengths), world, 60, packer)
    assert len(parts) == world
    assert sorted(np.concatenate(parts)) == list(range(len(lengths)))
