"""What a real server writes to standard error; of an agent `node/test_sessions.py` says it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from paceline.wire import TELEMETRY, StepBatch
from paceline.wire.bus import publish
from support.records import record
from support.waiting import until

SECRET = "hunter2hunter2"


@contextmanager
def running(err: Path, *command: str) -> Iterator[None]:
    env = {**os.environ, "PACELINE_LOG_FORMAT": "json"}
    with (
        err.open("wb") as stream,
        subprocess.Popen(command, stderr=stream, stdout=subprocess.DEVNULL, env=env) as process,
    ):
        try:
            yield
        finally:
            process.kill()


def said(err: Path, words: str) -> list[dict[str, Any]]:
    """All lines, once one of them has these words."""
    until(lambda: words in err.read_text(), f"{words!r} in the log")
    until(lambda: err.read_text().endswith("\n"), "the line's end")
    return [json.loads(line) for line in err.read_text().splitlines()]


def test_a_server(bus_url: str, tmp_path: Path) -> None:
    err, database = tmp_path / "err", f"sqlite:///{tmp_path / 'paceline.db'}"
    own = ("--only", "worker", "--database", database, "--bus", bus_url)
    with (
        redis.Redis.from_url(bus_url) as bus,
        running(err, sys.executable, "-m", "paceline_backend.cli", *own),
    ):
        publish(bus, TELEMETRY, StepBatch([record(0, 0)]), f"pl_0a1b2c3d_{SECRET}")
        lines = said(err, "pl_0a1b2c3d_***")
    assert {"time", "level", "logger", "message", "process", "thread"} <= set(lines[0])
    assert SECRET not in err.read_text()
