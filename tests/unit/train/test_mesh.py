"""Groups of ranks in a mesh: which lanes there are, and what a step takes a group."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.train.mesh import described, joint, lanes_of
from support.records import record

TIMES = st.floats(0, 10)


@given(groups=st.integers(1, 5), size=st.integers(1, 4), inner=st.booleans())
def test_each_lane_has_one_rank_of_each_group(groups: int, size: int, inner: bool) -> None:
    """Whether the data-parallel dimension is a mesh's first or its last one."""
    ranks = np.arange(groups * size)
    lanes = ranks.reshape(size, groups) if inner else ranks.reshape(groups, size).T
    of = {int(rank): lane.tolist() for lane in lanes for rank in lane}
    assert lanes_of([of[rank] for rank in range(groups * size)]) == lanes.tolist()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([[0, 1], [0, 1], [2, 3]], "do not split the 3 ranks into groups of equal size"),
        ([[0, 1], [0, 1], [2]], "do not split the 3 ranks into groups of equal size"),
        ([[2, 3], [2, 3], [0, 1], [0, 1]], "do not split the 4 ranks into groups of equal size"),
        ([[0, 1], [0, 1], [1, 2]], "do not split the 3 ranks into groups of equal size"),
        ([[2, 0], [3, 1], [2, 0], [3, 1]], r"ranks \[2, 0\] of its data-parallel part are not"),
    ],
)
def test_a_mesh_that_does_not_split_the_ranks_is_refused(words: list[list[int]], why: str) -> None:
    with pytest.raises(ValueError, match=f"mesh: .*{why}"):
        lanes_of(words)


def test_what_is_no_mesh_is_refused() -> None:
    assert described(None) is None
    for given_ in (2, [0, 1], SimpleNamespace(mesh=3)):
        with pytest.raises(TypeError, match=re.escape('such as mesh["dp"]')):
            described(given_)


@given(times=st.lists(st.tuples(TIMES, TIMES), min_size=1, max_size=4), sync_s=TIMES)
def test_a_group_takes_as_long_as_its_slowest_rank(
    times: list[tuple[float, float]], sync_s: float
) -> None:
    data_s, compute_s = times[0]
    of = joint(record(0, 0, data_s=data_s, compute_s=compute_s, sync_s=sync_s), times)
    assert of.data_s == max(data for data, _ in times)
    assert of.data_s + of.compute_s == pytest.approx(max(map(sum, times)))
    assert of.compute_s >= 0
    assert 0 <= of.sync_s <= sync_s + 1e-9


def test_a_rank_that_waits_for_another_s_data_does_not_compute() -> None:
    """Rank 1 loads for 50 ms; rank 0, which loads at once, waits for it in its passes."""
    of = joint(record(0, 0, data_s=0.0, compute_s=0.06), [(0.0, 0.06), (0.05, 0.01)])
    assert (of.data_s, of.compute_s) == pytest.approx((0.05, 0.01))
