"""The embedded default as one thing: control plane, dashboard, bus, database and one agent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from paceline.errors import PacelineError
from paceline.processes import die_with_parent

_READY = re.compile(r"Paceline on http://\S+:(\d+)")
_STOP_S = 25.0  # an agent ends its ranks, a server its streams, well before


class Stack:
    """`paceline server` and `paceline agent` as child processes of this one; a context manager.

    Args:
        data: directory for database, bus file, logs and runs; made if missing.
        port: of REST and dashboard; 0 takes any free one.
        host: to listen on.
        token: wanted from clients; needed beyond loopback.
    """

    def __init__(
        self, data: Path, port: int = 8000, host: str = "127.0.0.1", token: str | None = None
    ) -> None:
        self.data = data
        self.host = host
        self.port = port
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.http = httpx.Client(headers=headers, timeout=10)  # its base URL: once it is known
        self.server: subprocess.Popen[bytes] | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        self._env = {"PACELINE_TOKEN": token} if token else {}
        self._said_before: dict[str, int] = {}  # bytes in each log when its process started

    @property
    def url(self) -> str:
        """Of dashboard and REST, as one on this machine reaches it."""
        return f"http://{'127.0.0.1' if self.host == '0.0.0.0' else self.host}:{self.port}"

    def start(self) -> Stack:
        """Starts both and waits until the server is ready and the agent registered.

        Raises:
            PacelineError: one of them ended or did not become ready; with its own last words.
        """
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            (self.data / "server.log").touch()
        except OSError as error:
            raise PacelineError(
                f"the data directory {self.data} cannot be written ({error.strerror}); "
                "choose another with --data"
            ) from error
        self.start_server()
        self.start_agent()
        return self

    def start_server(self) -> None:
        """Starts the control plane (again, after a fault) and waits until it is ready."""
        where = ["--host", self.host, "--port", str(self.port), "--data", str(self.data)]
        self.server = self._spawn("server", *where)
        # Its own word, not an answer on the port: that might be another server's.
        self._wait(self.server, "server", lambda: _READY.search(self._said("server")))
        self.port = int(_READY.findall(self._said("server"))[-1])
        self.http.base_url = self.url

    def start_agent(self) -> None:
        """Starts the agent and waits until the server knows its node."""
        where = ["--server", self.url, "--data", str(self.data)]
        self.agent = self._spawn("agent", *where)
        self._wait(self.agent, "agent", self._registered)

    def api(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One REST call, its JSON.

        Raises:
            PacelineError: the server refused; with its problem's detail.
        """
        answer = self.http.request(method, f"/api/v1{path}", json=body)
        if answer.is_error:
            try:
                detail = answer.json().get("detail", answer.text)
            except ValueError:
                detail = answer.text
            raise PacelineError(f"{method} {path}: {answer.status_code} {detail}")
        return answer.json()

    def stop(self) -> None:
        """Ends the agent with its runs, then the server with its bus. Idempotent."""
        for child in (self.agent, self.server):
            if child is not None and child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(timeout=_STOP_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
        self.agent = self.server = None
        self.http.close()

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        with (self.data / f"{arguments[0]}.log").open("ab") as log:
            self._said_before[arguments[0]] = log.tell()
            return subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                start_new_session=True,  # Ctrl-C is ours: we stop them in order
                preexec_fn=die_with_parent,
            )

    def _wait(self, child: subprocess.Popen[bytes], name: str, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + 60
        while child.poll() is None and time.monotonic() < deadline:
            if ready():
                return
            time.sleep(0.05)
        code = child.poll()
        why = "did not become ready in 60 s" if code is None else f"ended with code {code}"
        words = self._said(name).strip().splitlines()[-3:]
        raise PacelineError(f"paceline {name} {why}: " + "\n".join(words))

    def _said(self, name: str) -> str:
        """What a child has written since it was started last."""
        with (self.data / f"{name}.log").open("rb") as log:
            log.seek(self._said_before[name])
            return log.read().decode(errors="replace")

    def _registered(self) -> bool:
        return any(node["alive"] for node in self.api("GET", "/nodes"))

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
