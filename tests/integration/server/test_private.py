"""Another user of the machine reads nothing that Paceline keeps, and no secret is an argument."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user"),
]

# Prints each file and directory that it can open.
_READER = """
import os, sys
for folder, folders, files in os.walk(sys.argv[1]):
    print(folder)
    for name in files:
        try:
            open(os.path.join(folder, name), "rb").read(1)
            print(os.path.join(folder, name))
        except OSError:
            pass
"""


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory below which everybody may look: pytest's own are closed."""
    directory = Path(tempfile.mkdtemp(prefix="paceline-private-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def readable_by_nobody(directory: Path) -> list[str]:
    """What the user `nobody` can list or read of a directory."""
    command = ["/usr/bin/python3", "-c", _READER, str(directory)]
    said = subprocess.run(
        command, user="nobody", extra_groups=[], cwd="/", check=True, capture_output=True, text=True
    )
    return said.stdout.splitlines()


def test_a_script_keeps_its_users_umask(open_directory: Path) -> None:
    script = open_directory / "train.py"
    script.write_text("import os; print('umask', oct(os.umask(0)))")
    said = subprocess.run(
        [sys.executable, "-m", "paceline", "run", "--data", open_directory / "data", script],
        umask=0o027,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "umask 0o27" in said.stdout + said.stderr
    assert readable_by_nobody(open_directory / "data") == []
