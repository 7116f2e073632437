"""Which cases of a long list run by default."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def some_long(names: Iterable[str], every: int = 4) -> list[ParameterSet]:
    """One of `every` few cases for each run of the tests; the others are `long`."""
    return [
        pytest.param(name, marks=pytest.mark.long if at % every else ())
        for at, name in enumerate(names)
    ]
