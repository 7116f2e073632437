"""The token of a server on this machine: who finds it, and when it is not sent."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from paceline.node import tokens

URL = "http://127.0.0.1:8000"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def test_it_is_there_while_the_server_works(home: Path) -> None:
    assert tokens.kept(URL) is None
    with tokens.keeping(URL, "secret") as path:
        assert tokens.kept(URL) == tokens.kept(f"{URL}/") == "secret"
        assert tokens.kept("http://localhost:8000") == "secret"
        assert tokens.kept("http://127.0.0.1:8001") is None
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert tokens.kept(URL) is None
    assert not path.exists()


def test_what_a_killed_server_left_is_not_sent(home: Path) -> None:
    """Somebody else may listen on the port by now."""
    with tokens.keeping(URL, "secret") as path:
        left = path.read_bytes()
    path.touch(mode=0o600)
    path.write_bytes(left)
    assert tokens.kept(URL) is None
    with tokens.keeping(URL, "newer"):
        assert tokens.kept(URL) == "newer"


@pytest.mark.parametrize("mode", [0o640, 0o604])
def test_a_file_that_others_may_read_is_not_believed(mode: int) -> None:
    with tokens.keeping(URL, "secret") as path:
        path.chmod(mode)
        assert tokens.kept(URL) is None


def test_what_is_no_address_has_none() -> None:
    for server in ("", "127.0.0.1:8000", "http://", "http://[", "http://h:99999", "http://a/../b"):
        assert tokens.kept(server) is None


def test_without_a_place_to_keep_it(home: Path) -> None:
    home.write_text("a file")
    with pytest.raises(OSError, match=os.strerror(20)), tokens.keeping(URL, "secret"):
        pass
    assert tokens.kept(URL) is None
