"""`scripts/setup.sh` on a machine without a network. Its programs are stubs on the PATH."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MADE_FROM = ("pyproject.toml", "constraints.txt", "scripts/setup.sh")


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose .venv is complete."""
    (tmp_path / "scripts").mkdir()
    for name in (*MADE_FROM, "package.json", "package-lock.json"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("pip", "python"):
        program(tmp_path / ".venv" / "bin" / name, "exit 0")
    content = b"".join((tmp_path / name).read_bytes() for name in MADE_FROM)
    stamp = f"dev {hashlib.sha256(content).hexdigest()}  -\n"
    for name in ("dev", "torchft"):
        (tmp_path / ".venv" / f".paceline-{name}").write_text(stamp)
    program(tmp_path / "bin" / "node", "exit 0")
    return tmp_path


def set_up(checkout: Path, npm: str) -> subprocess.CompletedProcess[str]:
    program(checkout / "bin" / "npm", npm)
    path = f"{checkout / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "scripts/setup.sh", "dev"],
        cwd=checkout,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_tools_that_are_there_are_not_installed_again(checkout: Path) -> None:
    (checkout / "node_modules").mkdir()
    done = set_up(checkout, '[ "$1" = ls ]')
    assert (done.returncode, done.stderr) == (0, "")
    assert (checkout / "node_modules" / ".paceline").exists()


def test_torchft_is_optional_and_tried_again(checkout: Path) -> None:
    (checkout / "node_modules").mkdir()
    stamp = checkout / ".venv" / ".paceline-torchft"
    wanted = stamp.read_text()
    stamp.unlink()
    pip = checkout / ".venv" / "bin" / "pip"
    program(pip, "exit 1")
    for _ in range(2):
        done = set_up(checkout, '[ "$1" = ls ]')
        assert done.returncode == 0
        assert "torchft could not be installed" in done.stderr
    program(pip, "exit 0")
    assert set_up(checkout, '[ "$1" = ls ]').returncode == 0
    assert stamp.read_text() == wanted
    assert set_up(checkout, '[ "$1" = ls ]').stderr == ""


def test_what_cannot_be_installed_is_said_in_one_line(checkout: Path) -> None:
    (checkout / "node_modules").mkdir()
    npm = "[ $1 = ls ] || printf 'npm error code ENOTFOUND\\nnpm error network no\\n' >&2; exit 1"
    done = set_up(checkout, npm)
    assert done.returncode == 1
    *_, last = done.stderr.splitlines()
    assert "npm cannot install the tools of package.json (code ENOTFOUND)" in last
    assert "run 'make setup-dev' with a network, or copy node_modules" in last
    assert not (checkout / "node_modules" / ".paceline").exists()
