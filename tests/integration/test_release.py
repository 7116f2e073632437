"""A checkout without an installation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_checkout_that_is_not_installed_has_no_version() -> None:
    program = "import paceline; print(paceline.__version__)"
    command = [sys.executable, "-S", "-c", program]  # -S: without site-packages
    ended = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT / "agent")}, capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("0+unknown\n", "")
