"""A data directory in which another user may have planted something is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.node.rundir import open_data
from paceline_backend.server.supervisor import DataDirectory

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")

NOBODY = 65534


def opened_by_server(data: Path) -> None:
    with DataDirectory(data):
        pass


@pytest.mark.parametrize("opened", [open_data, opened_by_server])
@pytest.mark.parametrize(
    "planted", [".", "paceline.db", "token", "bus", "bus/password", "runs", "runs/4711", "link"]
)
def test_what_another_user_owns_is_refused(
    tmp_path: Path, planted: str, opened: Callable[[Path], object]
) -> None:
    data = tmp_path / "data"
    for folder in ("bus", "runs/4711"):
        (data / folder).mkdir(parents=True)
    for name in ("paceline.db", "token", "bus/password"):
        (data / name).touch()
    (data / "link").symlink_to("/etc")
    opened(data)
    os.chown(data / planted, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(
        PacelineError, match=r"--data: .* belongs to another user \(nobody\)"
    ) as said:
        opened(data)
    assert str(data / planted) in str(said.value)
    os.chown(data / planted, 0, 0, follow_symlinks=False)
    opened(data)


def test_a_link_to_anothers_folder_is_refused(tmp_path: Path) -> None:
    theirs, data = tmp_path / "theirs", tmp_path / "data"
    theirs.mkdir()
    os.chown(theirs, NOBODY, NOBODY)
    data.symlink_to(theirs)
    for opened in (open_data, opened_by_server):
        with pytest.raises(PacelineError, match="belongs to another user"):
            opened(data)
    assert list(theirs.iterdir()) == []
