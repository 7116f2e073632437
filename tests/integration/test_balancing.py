"""What `paceline.partition` loads."""

from __future__ import annotations

import subprocess
import sys


def test_it_needs_neither_torch_nor_a_server() -> None:
    program = (
        "import sys, paceline; paceline.partition([3, 1, 2], 2);"
        "print(sorted({'torch', 'redis', 'fastapi', 'sqlalchemy', 'sklearn'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
