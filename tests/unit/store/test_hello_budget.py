"""What the store refuses of a Hello with a token budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline_backend.store import refusals
from support.records import hello

SIZES = np.array([1.0, 3.0, 2.0], "<f8").tobytes()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"token_limits": [4.0, 6.0]}, None),
        ({"token_budget": 0.0}, "token_budget is 0.0"),
        ({"token_budget": float("nan")}, "token_budget is nan"),
        ({"token_budget": 2.5}, "sizes contains 3, more than token_budget, 2.5"),
        ({"drop_last": True}, "cannot be combined with drop_last"),
        ({"grid": 2}, "cannot be combined with drop_last, grid"),
        ({"limits": [2, 2]}, "cannot be combined with drop_last, grid, limits"),
        ({"token_limits": [4.0]}, "token_limits has 1 values for 2 ranks"),
        ({"token_limits": [4.0, -1.0]}, "token_limits contains a number"),
        ({"token_limits": [4.0, 4.0]}, "steps of up to 5 are sure to fit"),
        ({"steps_per_epoch": 0}, "steps_per_epoch is 0"),
        ({"steps_per_epoch": 3}, None),
        ({"steps_per_epoch": 4}, "steps_per_epoch is 4: it must be 1 to 3"),
        ({"token_budget": None}, "steps_per_epoch is given without token_budget"),
        ({"token_budget": None, "steps_per_epoch": None}, None),
        (
            {"token_budget": None, "steps_per_epoch": None, "token_limits": [4.0, 6.0]},
            "token_limits is given without token_budget",
        ),
        ({"uneven_steps": True}, "cannot be combined with uneven_steps"),
        ({"stream": True, "sizes": b""}, "cannot be combined with a stream"),
    ],
)
def test_a_budget_that_no_plan_could_keep_is_refused(
    changes: dict[str, Any], why: str | None
) -> None:
    given = {"sizes": SIZES, "global_batch": 2, "token_budget": 6.0, "steps_per_epoch": 2}
    given["uneven_steps"] = False
    said = refusals.of_hello(hello(2, **(given | changes)))
    if why is None:
        assert said is None
    else:
        assert said is not None
        assert why in said
