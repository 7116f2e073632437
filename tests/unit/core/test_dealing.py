"""Batches are cut into the fewest micro-batches that fit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.batch_limits.budget import counts_within
from paceline.core.dealing import cut, cut_within


@given(st.lists(st.floats(0.1, 1e3), min_size=1, max_size=60), st.integers(1, 70))
def test_each_sample_once_within_the_limit_in_the_fewest_parts(
    given_sizes: list[float], most: int
) -> None:
    sizes = np.array(given_sizes)
    pieces = cut(sizes, most)
    counts = [len(piece) for piece in pieces]
    assert sorted(np.concatenate(pieces)) == list(range(len(sizes)))
    assert len(pieces) == -(-len(sizes) // most)
    assert 1 <= min(counts) <= max(counts) <= most
    assert max(counts) - min(counts) <= 1
    in_order = sizes[np.concatenate(pieces)]
    assert (in_order[:-1] <= in_order[1:]).all()


@given(st.integers(1, 200), st.integers(1, 12), st.integers(1, 40))
def test_micro_batches_lie_on_the_grid(samples: int, grid: int, most: int) -> None:
    pieces = cut(np.ones(samples), most, grid)
    counts = [len(piece) for piece in pieces]
    assert sorted(np.concatenate(pieces)) == list(range(samples))
    assert max(counts) <= most
    if grid <= most:
        off = [count % grid for count in counts if count % grid]
        assert off == [samples % grid] * (samples % grid > 0)
        assert len(pieces) == -(-samples // (most - most % grid))


@given(
    st.lists(st.one_of(st.integers(1, 50).map(float), st.floats(0.1, 1e3)), min_size=1),
    st.floats(1.0, 4.0),
)
def test_micro_batches_of_sizes_keep_what_fits_and_are_few_and_even(
    given_sizes: list[float], room: float
) -> None:
    sizes = np.array(given_sizes)
    most = float(sizes.max()) * room
    pieces = cut_within(sizes, most)
    loads = np.array([sizes[piece].sum() for piece in pieces])
    assert sorted(np.concatenate(pieces)) == list(range(len(sizes)))
    assert min(map(len, pieces)) > 0
    assert (loads <= most * (1 + 1e-9)).all()
    in_order = sizes[np.concatenate(pieces)]
    assert (in_order[:-1] <= in_order[1:]).all()
    assert len(pieces) == len(counts_within(np.sort(sizes), most))


def test_micro_batches_of_sizes_are_even() -> None:
    pieces = cut_within(np.ones(100), 80.0)
    assert [len(piece) for piece in pieces] == [50, 50]
