"""A control plane for tests: `paceline server` as a child process."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.node.client import Client
from paceline.wire import ENDED

T = TypeVar("T")

_WAIT_S = 300.0


class TestedServer(Protocol):
    """A control plane that a test can kill and send requests to."""

    folder: Path
    server: subprocess.Popen[str] | None
    url: str

    def start_server(self) -> None:
        """Start the control plane; after a kill, on the same port and data."""

    def api(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request to a path below ``/api/v1``, and return its JSON."""

    def run(self, run: str) -> dict[str, Any]:
        """Return the JSON with which the REST API describes a run."""

    def reaches(self, run: str, step: int, world: int, timeout_s: float = _WAIT_S) -> None:
        """Wait until a run with `world` ranks has completed a step."""

    def ends(self, run: str, timeout_s: float = _WAIT_S) -> dict[str, Any]:
        """Wait until a run has ended, and return it."""


class ControlPlane:
    """A context manager that runs `paceline server` with a database and a bus of its own.

    All files of the server are in `folder`. It listens on `host`, an address that nodes can reach.
    """

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.server: subprocess.Popen[str] | None = None
        self.url = ""
        self.token = secrets.token_hex(16)
        self._host = host
        self._port = 0

    def __enter__(self) -> ControlPlane:
        self.start_server()
        return self

    def __exit__(self, *_: object) -> None:
        if self.server is None:
            return
        self.server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.server.wait(120)
        self.server.kill()
        self.server.wait()
        if self.server.stdout is not None:
            self.server.stdout.close()

    def start_server(self) -> None:
        """Start the control plane; after a kill, on the same port and data."""
        words = [sys.executable, "-m", "paceline", "server", "--trust-network"]
        words += ["--host", self._host, "--port", str(self._port)]
        words += ["--data", str(self.folder / "server")]
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                words,
                env={**os.environ, "PACELINE_TOKEN": self.token},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.server.stdout is not None
        self._port = int(self.server.stdout.readline().rpartition(":")[2])
        self.url = f"http://{self._host}:{self._port}"

    def api(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request to a path below ``/api/v1``, and return its JSON."""
        with Client(self.url, self.token) as client:
            if_match = None if method == "GET" else "*"
            return client.call(method, path, body, if_match=if_match)

    def run(self, run: str) -> dict[str, Any]:
        """Return the JSON with which the REST API describes a run."""
        shown: dict[str, Any] = self.api("GET", f"/runs/{run}")
        return shown

    def reaches(self, run: str, step: int, world: int, timeout_s: float = _WAIT_S) -> None:
        """Wait until a run with `world` ranks has completed a step."""

        def there() -> bool:
            shown = self.run(run)
            assert shown["state"] not in ("failed", "stopped"), shown["message"]
            return bool(shown["world"] == world and (shown["step"] or 0) >= step)

        until(there, f"step {step} of {run} with {world} ranks", timeout_s, 0.1)

    def ends(self, run: str, timeout_s: float = _WAIT_S) -> dict[str, Any]:
        """Wait until a run has ended, and return it."""
        until(lambda: self.run(run)["state"] in ENDED, f"the end of {run}", timeout_s, 0.1)
        return self.run(run)


def until(
    condition: Callable[[], T], what: str, timeout_s: float = _WAIT_S, pause_s: float = 0.1
) -> T:
    """Call the condition until its value is true, and return that value.

    `what` describes the condition in the error message. `timeout_s` is generous, because a passing
    test never waits that long.
    """
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(pause_s)
    return value
