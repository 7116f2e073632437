"""Unit tests start no process: one that does belongs to tests/integration."""

from __future__ import annotations

import multiprocessing.process
import subprocess
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a unit test starts a process: move it to tests/integration")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", refuse)
