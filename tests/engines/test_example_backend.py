"""An engine from outside: the example package, installed, passes the contract of engines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "backend"

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that pip installed the example into."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *offline, "--target", target, EXAMPLE], check=True)
    return target


def contract(installed: Path, folder: Path, *more: str) -> str:
    """Runs the example's tests; what pytest says."""
    words = ["-q", "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}", str(EXAMPLE), *more]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=installed,
        env={**os.environ, "PYTHONPATH": str(installed)},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_trains_exactly_on_two_nodes(installed: Path, tmp_path: Path) -> None:
    assert "2 passed" in contract(installed, tmp_path, "-k", "exactly or options")


@pytest.mark.long
def test_it_passes_the_contract(installed: Path, tmp_path: Path) -> None:
    report = os.environ.get("PACELINE_EXAMPLE_REPORT", str(tmp_path / "report.xml"))
    said = contract(installed, tmp_path, f"--junitxml={report}")
    assert " passed" in said
    assert "skipped" not in said
