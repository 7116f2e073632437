"""The embedded bus."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline_backend.server.embedded import EmbeddedBus


def test_another_server_on_its_port_is_not_taken_for_its_own(tmp_path: Path) -> None:
    """One that outlived its supervisor answers like the child that could not bind the port."""
    with EmbeddedBus(tmp_path) as orphan:
        second = EmbeddedBus(tmp_path, orphan.port)
        with pytest.raises(PacelineError, match=f"did not start on port {orphan.port}"):
            second.start()
        assert not second.alive()
        assert orphan.alive()
