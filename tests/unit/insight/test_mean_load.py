"""What a mean step holds, by which a forecast turns rates into seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline_backend.insight.whatif.forecast import mean_load
from support.records import hello

SIZES = np.arange(1.0, 11.0)  # 55 in all


@pytest.mark.parametrize(
    ("fields", "load"),
    [
        ({"global_batch": 4}, 55 / 3),
        ({"global_batch": 4, "drop_last": True}, 22.0),
        # Steps of 4, 2, 1, 1, 1 and 1 samples: the mean of 5 / 3 is rounded to 2.
        ({"global_batch": 2, "token_budget": 11.0, "steps_per_epoch": 6}, 55 / 6),
    ],
)
def test_the_load_of_a_mean_step(fields: dict[str, Any], load: float) -> None:
    assert mean_load(hello(2, sizes=SIZES.tobytes(), **fields), SIZES) == pytest.approx(load)
