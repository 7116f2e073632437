"""Ranks that the tests of a module share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """As many as the module's `WORLD`; two where it has none."""
    pool = Ranks(getattr(request.module, "WORLD", 2))
    yield pool
    pool.stop()
