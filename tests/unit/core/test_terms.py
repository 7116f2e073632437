"""Steps of an epoch."""

from __future__ import annotations

import pytest

from paceline.core.terms import steps_per_epoch


@pytest.mark.parametrize(
    ("samples", "drop_last", "steps"),
    [(1_000, False, 32), (1_000, True, 31), (960, False, 30), (960, True, 30), (31, True, 0)],
)
def test_an_incomplete_last_step_counts_unless_it_is_left_out(
    samples: int, drop_last: bool, steps: int
) -> None:
    assert steps_per_epoch(samples, 32, drop_last) == steps
