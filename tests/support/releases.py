"""The release before, built from this repository's history, and processes of it."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline_backend.server.stack import Stack
from support.waiting import DEADLINE_S

BEFORE = "30b5758"  # 0.1.0
TABLES = "0007"  # its revision of the database

_ROOT = Path(__file__).parents[2]


def build(folder: Path) -> Path:
    """Builds 0.1.0; the folder to put on PYTHONPATH. Skips a test where the history lacks it."""
    archive = ["git", "-C", str(_ROOT), "archive", BEFORE]
    packed = subprocess.run(archive, capture_output=True, check=False)
    if packed.returncode:
        pytest.skip(f"this copy of the repository has no commit {BEFORE}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as sources:
        sources.extractall(folder / "sources", filter="data")
    # With its metadata: entry points and version come from there.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    alone = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder / "built")]
    subprocess.run([*pip, *alone, str(folder / "sources")], check=True)
    return folder / "built"


@contextmanager
def using(release: Path | None) -> Iterator[None]:
    """Processes that start meanwhile are of this release; None: of the present one."""
    if release is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(release))
        yield


def replace_server(stack: Stack, release: Path | None) -> None:
    """Stops the server, and starts one of another release on its data and port."""
    stop_server(stack)
    with using(release):
        stack.start_server()


def stop_server(stack: Stack) -> None:
    """Stops the server as an operator does."""
    assert stack.server is not None
    stack.server.send_signal(signal.SIGTERM)
    assert stack.server.wait(timeout=DEADLINE_S) == 0


def downgrade(stack: Stack) -> None:
    """Takes the database back to 0.1.0's tables."""
    command = [sys.executable, "-m", "paceline", "db", "downgrade", TABLES]
    subprocess.run([*command, "--data", str(stack.data)], check=True)
