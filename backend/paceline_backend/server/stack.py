"""A complete local setup: control plane, dashboard, bus, database and one agent.

`paceline up`, `paceline demo` and tests start the class `Stack`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.core.errors import PacelineError
from paceline.node import private
from paceline.node.client import Client
from paceline.node.processes import die_with_parent

_READY = re.compile(r"Paceline on (http://\S+:(\d+))")
_READY_S = 180.0
# A child that has not stopped after this time is killed. An agent needs up to 28 s to end its
# ranks; a server needs far less to end its streams.
_CHILD_STOP_S = 35.0  # seconds


class Stack:
    """`paceline server` and `paceline agent` as child processes; a context manager.

    `data` is the directory for database, bus file, logs and runs; it is created if missing. Port 0
    means any free port. `token` is required if `host` is not a loopback address. Without
    `database`, SQLite in `data` is used.
    """

    def __init__(
        self,
        data: Path,
        port: int = 8000,
        host: str = "127.0.0.1",
        token: str | None = None,
        database: str | None = None,
    ) -> None:
        self.data = data
        self.host = host
        self.port = port
        # URL of dashboard and REST. The server prints it when it is ready.
        self.url = ""
        self.server: subprocess.Popen[bytes] | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        self._token = token
        self.database = database
        # Further variables for the agent and its runs.
        self.agent_env: dict[str, str] = {}
        self._client: Client | None = None
        # Name of a child → size of its log when its process started.
        self._said_before: dict[str, int] = {}  # bytes

    def start(self) -> Stack:
        """Start server and agent; wait until the server is ready and the agent is registered.

        Raises:
            PacelineError: server or agent ended, or did not become ready. The message has the end
                of its log.
        """
        try:
            self.data.mkdir(0o700, parents=True, exist_ok=True)
            for name in ("server.log", "agent.log"):
                (self.data / name).touch(0o600)
        except OSError as error:
            raise PacelineError(
                f"the data directory {self.data} cannot be written ({error.strerror}); "
                "choose another with --data"
            ) from error
        try:
            self.start_server()
            self.start_agent()
        except BaseException:
            # Catch all exceptions, because signals raise exceptions, too.
            self.stop()
            raise
        return self

    def start_server(self) -> None:
        """Start the control plane, or restart it after a fault, and wait until it is ready."""
        where = ["--host", self.host, "--port", str(self.port), "--data", str(self.data)]
        self.server = self._spawn("server", *where)
        # Wait for the server's own output: on the port, another server might answer.
        self._wait(self.server, "server", lambda: _READY.search(self._said("server")))
        url, port = _READY.findall(self._said("server"))[-1]
        # Keep the port for a restart after a fault.
        self.port = int(port)
        self.url = url
        if self._client is not None:
            self._client.close()
        self._client = Client(url, self._token)

    def start_agent(self) -> None:
        """Start the agent, and wait until the server has registered its node."""
        where = ["--server", self.url, "--data", str(self.data)]
        started = time.time()
        self.agent = self._spawn("agent", *where)
        self._wait(self.agent, "agent", lambda: self._registered(started))

    def api(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Send a request to a path below ``/api/v1``, and return its JSON.

        Requests other than GET are sent with `If-Match: *`, so that they need not know the current
        revision. Errors are those of `Client.call`.
        """
        assert self._client is not None
        if_match = None if method == "GET" else "*"
        return self._client.call(method, path, body, if_match=if_match)

    def client(self) -> Client:
        """Return a further client of the server, such as for another thread."""
        assert self._client is not None
        return self._client.twin()

    def login_link(self) -> str:
        """Return a link that logs one browser in, within ten minutes."""
        return self.url + str(self.api("POST", "/login-links")["path"])

    def stop(self) -> None:
        """Stop the agent with its runs, then the server with its bus. Idempotent."""
        for child in (self.agent, self.server):
            if child is not None and child.poll() is None:
                child.send_signal(signal.SIGTERM)
                try:
                    child.wait(timeout=_CHILD_STOP_S)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
        self.agent = self.server = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def _spawn(self, *arguments: str) -> subprocess.Popen[bytes]:
        # Variables such as PACELINE_DATABASE are meant for another server, not for this one.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PACELINE_")}
        if arguments[0] == "agent":
            environment |= self.agent_env
        elif self.database:
            environment["PACELINE_DATABASE"] = self.database
        if self._token:
            environment["PACELINE_TOKEN"] = self._token
        with (self.data / f"{arguments[0]}.log").open("ab") as log:
            self._said_before[arguments[0]] = log.tell()
            return subprocess.Popen(
                [sys.executable, "-m", "paceline", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                # Use the user's umask, not the stricter one that this process may have set, because
                # the agent passes it on to runs.
                umask=private.given_umask(),
                # Ctrl-C must reach only this process, which then stops the children in sequence.
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _wait(self, child: subprocess.Popen[bytes], name: str, ready: Callable[[], object]) -> None:
        deadline = time.monotonic() + _READY_S
        while child.poll() is None and time.monotonic() < deadline:
            if ready():
                return
            time.sleep(0.05)
        code = child.poll()
        why = (
            f"did not become ready in {_READY_S:.0f} s"
            if code is None
            else f"ended with code {code}"
        )
        words = "\n".join(self._said(name).strip().splitlines()[-3:])
        raise PacelineError(f"paceline {name} {why}: " + words.removeprefix(f"paceline {name}: "))

    def _said(self, name: str) -> str:
        with (self.data / f"{name}.log").open("rb") as log:
            log.seek(self._said_before[name])
            return log.read().decode(errors="replace")

    def _registered(self, since: float) -> bool:
        nodes = self.api("GET", "/nodes")
        return any(node["alive"] and node["heartbeat_at"] >= since for node in nodes)

    def __enter__(self) -> Stack:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
