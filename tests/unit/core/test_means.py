"""When parts of the parameters become their means, and which parameters are in a part."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.replicas import part_due, parted


@given(st.data(), st.integers(1, 40), st.integers(0, 1000))
def test_each_part_is_due_once_in_every_few_steps(
    data: st.DataObject, every: int, first: int
) -> None:
    parts = data.draw(st.integers(1, every))
    due = [part_due(step, every, parts) for step in range(first, first + every)]
    assert Counter(part for part in due if part is not None) == Counter(range(parts))
    assert part_due(every - 1, every, parts) == 0
    assert part_due(first, None, 1) is None


@given(st.lists(st.integers(1, 1000), min_size=1), st.integers(1, 12))
def test_each_parameter_is_in_one_part(sizes: list[int], parts: int) -> None:
    made = parted(sizes, parts)
    assert len(made) == parts
    assert [number for part in made for number in part] == list(range(len(sizes)))
    fair = sum(sizes) / parts
    assert all(sum(sizes[number] for number in part) < fair + 2 * max(sizes) for part in made)
