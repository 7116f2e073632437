"""A control plane and agents on nodes of their own: network namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.errors import InputError
from paceline.node.client import Client
from support.network import Network
from support.waiting import DEADLINE_S, until

TOKEN = "admin-of-tests-0123456789abcdef"
NEEDS_NETWORKS = [
    pytest.mark.ranks,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and ip"
    ),
]
SCRIPT = Path(__file__).with_name("several_script.py")


class Cluster:
    """`paceline server` on this process's side of a network, and agents on its nodes.

    Args:
        folder: for everything that they write.
        host: that the server listens on; empty: the address that the nodes reach.
        more: of the server's command line.
    """

    def __init__(self, network: Network, folder: Path, host: str = "", *more: str) -> None:
        self.network = network
        self.folder = folder
        self._host = host or network.head
        self._more = more
        self.agents: dict[int, subprocess.Popen[bytes]] = {}
        self.server: subprocess.Popen[str] | None = None
        self.url = ""
        self._port = 0

    def __enter__(self) -> Cluster:
        self.start_server()
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.agents.values(), self.server]:
            if process is not None and process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(DEADLINE_S)
                process.kill()
                process.wait()
        if self.server is not None and self.server.stdout is not None:
            self.server.stdout.close()

    def start_server(self) -> None:
        where = ("--host", self._host, "--port", str(self._port), "--trust-network", *self._more)
        with (self.folder / "server.log").open("ab") as log:
            self.server = subprocess.Popen(
                [*_paceline("server", *where), "--data", str(self.folder / "server")],
                env=_env(),
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.server.stdout is not None
        self._port = int(self.server.stdout.readline().rpartition(":")[2])
        self.url = f"http://{self.network.head}:{self._port}"

    def kill_server(self) -> None:
        """SIGKILL of all processes of the control plane."""
        assert self.server is not None and self.server.stdout is not None
        children = psutil.Process(self.server.pid).children(recursive=True)
        for process in [self.server, *children]:
            process.kill()
        self.server.wait()
        self.server.stdout.close()

    def start_agents(
        self, *nodes: int, env: Mapping[str, str] | None = None, host: str = ""
    ) -> None:
        """Starts the agents of some nodes, and waits until the server knows them.

        Args:
            host: name that these nodes give themselves; empty: each its own.
        """
        for node in nodes:
            name = self.network.name(node)
            words = self._agent(name, self.url)
            with (self.folder / f"{name}.log").open("ab") as log:
                self.agents[node] = subprocess.Popen(
                    self.network.command(node, words, host=host),
                    env={**_env(), **(env or {})},
                    stdout=log,
                    stderr=log,
                )
        wanted = {self.network.name(node) for node in nodes}
        until(lambda: wanted <= self._alive(), f"agents on {wanted}", 180, 0.1)

    def start_agent_on_head(self) -> str:
        """Starts an agent beside the server, which it reaches over loopback; its node's name."""
        words = self._agent("head", f"http://127.0.0.1:{self._port}")
        with (self.folder / "head.log").open("ab") as log:
            self.agents[0] = subprocess.Popen(words, env=_env(), stdout=log, stderr=log)
        until(lambda: "head" in self._alive(), "the agent on head", 180, 0.1)
        return "head"

    def _agent(self, name: str, url: str) -> Sequence[str]:
        data = str(self.folder / name)
        return _paceline("agent", "--server", url, "--node", name, "--data", data)

    def _alive(self) -> set[str]:
        return {str(node["id"]) for node in self.api("GET", "/nodes") if node["alive"]}

    def end_agent(self, node: int, number: signal.Signals) -> None:
        """Ends a node's agent; with SIGKILL its launchers and ranks end, too."""
        process = self.agents.pop(node)
        process.send_signal(number)
        process.wait(DEADLINE_S)

    def api(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """One call below ``/api/v1``."""
        with Client(self.url, TOKEN) as client:
            if_match = None if method == "GET" else "*"
            return client.call(method, path, body, if_match=if_match)

    @property
    def shared(self) -> Path:
        folder = self.folder / "shared"
        folder.mkdir(exist_ok=True)
        return folder

    def start_run(self, least: int, most: int, epochs: int = 1000, **fields: Any) -> str:
        """Starts a run of `several_script.py` with a rank on each of so many nodes; its id.

        It ends after so many epochs, or as `assert_ends_exact` says.
        """
        body = {
            "script": str(SCRIPT),
            "args": [str(self.shared), str(epochs), "2", "0.1"],
            "nproc": 1,
            "nodes_min": least,
            "nodes_max": most,
            "name": "several",
            "join_check": 0,  # nodes of one machine measure themselves at the same time
            **fields,
        }
        return str(self.api("POST", "/runs", body)["id"])

    def joins(self, run: str, node: str) -> bool:
        """Asks for a node to join; False: it cannot yet, as the run still counts with it."""
        try:
            self.api("POST", f"/runs/{run}/nodes", {"nodes": [node]})
        except InputError:
            return False
        return True

    def assert_exact(self, run: str) -> None:
        """Each epoch used each sample once, on the trajectory that survived: from the database."""
        covered = self.api("GET", f"/runs/{run}/coverage")
        assert covered["epochs"]
        assert all(epoch["exact"] for epoch in covered["epochs"]), covered

    def assert_ends_exact(self, run: str) -> None:
        """The run, told that it has trained enough, ends with its epoch."""
        (self.shared / "enough").touch()
        ended = self.ends(run)
        assert ended["state"] == "finished", ended["message"]
        self.assert_exact(run)

    def newest_step(self) -> int:
        lines = [
            json.loads(line)
            for path in self.shared.glob("steps-*")
            for line in path.read_text().split("\n")[:-1]
        ]
        return max((line[1] for line in lines if isinstance(line, list)), default=-1)

    def assert_complete(self, run: str) -> None:
        """The telemetry of all ranks and steps has come."""
        newest = self.newest_step()
        steps = self.api("GET", f"/runs/{run}/steps?from=0&to={newest}&points=5000")["step"]
        assert steps == list(range(newest + 1))

    def run(self, run: str) -> dict[str, Any]:
        shown: dict[str, Any] = self.api("GET", f"/runs/{run}")
        return shown

    def reaches(self, run: str, step: int, world: int, timeout_s: float = 300.0) -> None:
        """Waits until a run of so many ranks has come to a step."""

        def there() -> bool:
            now = self.run(run)
            assert now["state"] not in ("failed", "stopped"), now["message"]
            return bool(now["world"] == world and (now["step"] or 0) >= step)

        until(there, f"step {step} of {run} with {world} ranks", timeout_s, 0.1)

    def ends(self, run: str, timeout_s: float = 300.0) -> dict[str, Any]:
        final = ("finished", "failed", "stopped")
        until(lambda: self.run(run)["state"] in final, f"the end of {run}", timeout_s, 0.1)
        return self.run(run)


def _paceline(*words: str) -> Sequence[str]:
    return [sys.executable, "-m", "paceline", *words]


def _env() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    return {**env, "PACELINE_TOKEN": TOKEN}
