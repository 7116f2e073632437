"""Compiled kernels where their cache cannot be written or read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNEL = """
from paceline.policies.jit import compiled

@compiled
def twice(number):
    return 2 * number
"""
# Calls the kernel of each module given, and prints how often each was found in a cache.
CALL = """
import importlib, json, sys
hits = {}
for name in sys.argv[1:]:
    kernel = importlib.import_module(f"package.{name}").twice
    assert kernel(3) == 6
    hits[name] = sum(kernel.dispatcher.stats.cache_hits.values())
print(json.dumps(hits))
"""


@pytest.fixture
def package(tmp_path: Path) -> Iterator[Path]:
    """A package whose folder can be written until `call` is told otherwise."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    yield folder
    for path in (folder, folder / "__pycache__"):
        path.chmod(0o755)


def call(package: Path, *modules: str, writable: bool, **environment: str) -> dict[str, int]:
    for name in modules:
        if not (package / f"{name}.py").exists():
            (package / f"{name}.py").write_text(KERNEL)
    (package / "__pycache__").mkdir(exist_ok=True)
    for path in (package / "__pycache__", package):
        path.chmod(0o755 if writable else 0o555)
    # Modes do not bind root, unless it has no capabilities.
    bound = ["setpriv", "--bounding-set", "-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*bound, sys.executable, "-c", CALL, *modules],
        env={
            **{name: text for name, text in os.environ.items() if not name.startswith("NUMBA_")},
            "PYTHONPATH": str(package.parent),
            "HOME": str(package),
            "XDG_CACHE_HOME": str(package),
            **environment,
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    hits: dict[str, int] = json.loads(done.stdout)
    return hits


def test_kernels_in_a_folder_that_can_only_be_read(package: Path) -> None:
    assert call(package, "cached", "broken", "kept", writable=True) == dict.fromkeys(
        ("cached", "broken", "kept"), 0
    )
    for index in (package / "__pycache__").glob("broken.*.nbi"):
        index.write_bytes(b"")  # as a machine leaves it that lost its power
    for data in (package / "__pycache__").glob("kept.*.nbc"):
        data.chmod(0)
    matches = call(package, "cached", "broken", "kept", "fresh", writable=False)
    assert matches == {"cached": 1, "broken": 0, "kept": 0, "fresh": 0}
    # The cache holds kernels of this machine's processor, not of the other.
    other = {"NUMBA_CPU_NAME": "generic"}
    assert call(package, "cached", writable=False, **other) == {"cached": 0}
    assert call(package, "broken", "fresh", writable=True) == {"broken": 0, "fresh": 0}
    assert call(package, "broken", "fresh", writable=True) == {"broken": 1, "fresh": 1}
