"""How ranks find rank 0's store: what needs no second process."""

from __future__ import annotations

import socket
from datetime import timedelta
from pathlib import Path

import pytest

from paceline import PacelineError
from paceline.train import startup


def test_a_store_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "REACH", timedelta(milliseconds=100))
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(PacelineError, match=rf"rank 1 .*127\.0\.0\.1:{port}.*MASTER_ADDR"):
            startup.reach(1, "127.0.0.1", port)


def test_without_a_boot_id_the_host_name_stands_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose /proc is masked."""
    known = startup.place()
    monkeypatch.setattr(startup, "_BOOT_ID", tmp_path / "missing")
    here = startup.place()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    assert len({known, here, startup.place()}) == 3
    monkeypatch.setattr(startup, "_NETWORK", tmp_path / "missing")  # as on other systems
    assert startup.place()
