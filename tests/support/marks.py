"""Which cases of a long list run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def some_long(cases: Iterable[Any], every: int = 4) -> list[ParameterSet]:
    """One of `every` few cases for each run of the tests; the others are `long`.

    Args:
        cases: the parameter of each, or a tuple of several.
        every: how many cases stand for one that runs.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=pytest.mark.long if at % every else (),
        )
        for at, case in enumerate(cases)
    ]
