"""Readings of one shard that are compared: what is certain to lose samples, and what is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from paceline.core.streaming.reading import SeenSamples, difference


def word(samples: Iterable[Any]) -> str:
    seen = SeenSamples()
    for sample in samples:
        seen.add(sample)
    return seen.order(0, "a.tar").word


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("abc", "abc", ""),
        ("", "", ""),
        ("abc", "acb", "another order"),
        ("abc", "ab", "yields 3 samples when opened, and 2 when opened again"),
        ("", "ab", "yields 0 samples"),
        ("abc", "xyz", ""),  # random augmentation: nothing is known of the order
    ],
)
def test_what_two_readings_of_a_shard_say(first: str, second: str, says: str) -> None:
    said = difference(word(first), word(second))
    assert says in said
    assert bool(said) == bool(says)


def test_of_samples_that_cannot_be_pickled_the_number_is_compared() -> None:
    first, other, fewer = (word([lambda: None] * n) for n in (3, 3, 2))
    assert difference(first, other) == ""
    assert "yields 3 samples" in difference(first, fewer)
