"""Daemons of an engine, as children of this process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import IO


class Daemons:
    """Programs whose output goes to files `<name>.log` of a folder.

    Args:
        env: variables besides those of this process.
    """

    def __init__(self, folder: Path, env: dict[str, str] | None = None) -> None:
        self._folder = folder
        self._env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin", **(env or {})}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[IO[bytes]] = []

    def stop(self, *names: str) -> None:
        """Ends some daemons; without names all. What they have started goes on."""
        for name in names or reversed(list(self.processes)):
            process = self.processes.pop(name)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if not names:
            for log in self._logs:
                log.close()

    def _spawn(self, name: str, command: Sequence[str]) -> None:
        log = (self._folder / f"{name}.log").open("ab")
        self._logs.append(log)
        self.processes[name] = subprocess.Popen(
            command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
