"""A real Ray on a network of namespaces: a head without CPUs, and a node in each namespace.

Each has process ids of its own, too. So `ray stop` ends what is on its node, and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from support.network import Network
from support.waiting import until

BINARIES = Path(__file__).parents[2] / ".venv-ray" / "bin"
MISSING = "" if (BINARIES / "ray").exists() else "Ray is not installed: run scripts/ray.sh"

_CPUS = 2  # of a node
_TRIES = 6
# A busy machine is no failure: Ray gives up its own processes after much shorter times by itself.
_PATIENT = {
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_health_check_failure_threshold": "30",
    "RAY_health_check_timeout_ms": "60000",
    "RAY_worker_register_timeout_seconds": "300",
}
_WITHOUT_NEWS = ("--disable-usage-stats", "--object-store-memory", "80000000")
# The first process of a node, as a machine has it: waits for those that nobody else waits for.
_INIT = """
import os, signal, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.2)
"""


class Ray:
    """A cluster.

    Args:
        network: each of its nodes is a node of Ray, with two CPUs.
        folder: for the logs of what starts it.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self._folder = folder
        # Short: names of sockets below it have at most 107 letters.
        self.temporary = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.token = secrets.token_hex(32)
        self.address = f"http://{network.head}:8265"
        self._env = {
            **{name: text for name, text in os.environ.items() if not name.startswith("PACELINE_")},
            "PATH": f"{BINARIES}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            **_PATIENT,
        }
        self._inits: dict[str, subprocess.Popen[bytes]] = {}
        self._dashboard: tuple[list[str], dict[str, str]] | None = None

    def start(self) -> None:
        """Starts all, and waits until all nodes are there."""
        head = ("--head", "--port=6379", "--num-cpus=0", "--include-dashboard=true")
        dashboard = ("--dashboard-host=0.0.0.0", "--dashboard-port=8265")
        self._start("head", self._network.head, *head, *dashboard, f"--temp-dir={self.temporary}")
        for number in range(1, self._network.nodes + 1):
            where = (f"--address={self._network.head}:6379", f"--num-cpus={_CPUS}")
            self._start(self._network.name(number), self._network.address(number), *where)
        until(lambda: self._alive() == self._network.nodes + 1, "nodes of Ray", 300, 0.2)

    def stop(self) -> None:
        """Stops Ray as its users do: its processes get SIGTERM; ours get none from it."""
        for name in [*self._names()[1:], "head"]:
            assert self._on(name, "ray", "stop", "--grace-period", "60"), self._said(name)

    def close(self) -> None:
        """Ends all by SIGKILL, as the kernel does when a node's first process is gone."""
        for init in self._inits.values():
            init.kill()
            init.wait()
        shutil.rmtree(self.temporary, ignore_errors=True)

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """What Ray's API answers; None: nothing of this name is there."""
        headers = {"Authorization": f"Bearer {self.token}"}
        url = f"{self.address}{path}"
        answer = httpx.request(method, url, json=body, headers=headers, timeout=60)
        if answer.status_code == 404:
            return None
        assert answer.is_success, answer.text
        return answer.json()

    def jobs(self) -> list[str]:
        """Submission ids of jobs that have not ended, the oldest first."""
        rows = [row for row in self.ask("GET", "/api/jobs/") if row["submission_id"]]
        rows.sort(key=lambda row: row["start_time"])
        ended = ("STOPPED", "SUCCEEDED", "FAILED")
        return [row["submission_id"] for row in rows if row["status"] not in ended]

    def groups(self, state: str) -> int:
        known = self.ask("GET", "/api/v0/placement_groups")["data"]["result"]["result"]
        return sum(group["state"] == state for group in known)

    def shown(self, job: str) -> str:
        """All that Ray's API shows of a job, and all logs of the cluster."""
        paths = ("/api/jobs/", f"/api/jobs/{job}", f"/api/jobs/{job}/logs")
        more = ("actors", "tasks", "workers", "runtime_envs", "placement_groups")
        rows = [json.dumps(self.ask("GET", path)) for path in paths]
        rows += [json.dumps(self.ask("GET", f"/api/v0/{kind}?detail=true")) for kind in more]
        logs = self.temporary.glob("session_*/logs/**/*")
        return "\n".join(rows + [log.read_text(errors="replace") for log in logs if log.is_file()])

    def cancel(self, job: str) -> None:
        self.ask("POST", f"/api/jobs/{job}/stop")

    def submit(self, job: str, entrypoint: str, metadata: dict[str, str], **more: Any) -> None:
        """Submits another job than ours."""
        body = {"submission_id": job, "entrypoint": entrypoint, "metadata": metadata, **more}
        self.ask("POST", "/api/jobs/", body)

    def clean(self) -> None:
        if self._dashboard is not None:
            self.start_dashboard()
        for job in self.jobs():
            self.cancel(job)
        until(lambda: not self.jobs(), "the end of all jobs of Ray", 180, 0.2)

    def stop_dashboard(self) -> None:
        """From now on nobody answers at Ray's address; its jobs go on."""
        process = self._dashboard_process()
        self._dashboard = (process.cmdline(), process.environ())
        family = [*process.children(recursive=True), process]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family, 60)

    def start_dashboard(self) -> None:
        """Starts it again, as it was."""
        assert self._dashboard is not None
        words, env = self._dashboard
        self._spawn("head", words, env)
        self._dashboard = None
        until(self._answers, "Ray's dashboard", 120, 0.2)

    def processes(self, job: str) -> list[psutil.Process]:
        """Of a job: its driver, the actors and keepers of its nodes, and what these started."""
        slot = job.split(".", 2)[2]  # as a node's command line has it, with the run first
        nodes = [each for each in self._below() if slot in " ".join(_command(each))]
        workers = [each for node in nodes for each in _parents(node)]
        children = [each for node in nodes for each in node.children(recursive=True)]
        environments = [each for each in self._below() if _is_driver(each, job)]
        return list(
            {each.pid: each for each in (*environments, *workers, *nodes, *children)}.values()
        )

    def _below(self) -> Iterator[psutil.Process]:
        for init in self._inits.values():
            yield from psutil.Process(init.pid).children(recursive=True)

    def _dashboard_process(self) -> psutil.Process:
        for each in self._below():
            if any(word.endswith("dashboard/dashboard.py") for word in _command(each)):
                return each
        raise AssertionError("Ray's dashboard does not run")

    def _answers(self) -> bool:
        try:
            return bool(self.ask("GET", "/api/version"))
        except httpx.HTTPError:
            return False

    def _alive(self) -> int:
        if not self._answers():
            return 0
        nodes = self.ask("GET", "/api/v0/nodes")["data"]["result"]["result"]
        return sum(node["state"] == "ALIVE" for node in nodes)

    def _names(self) -> list[str]:
        return ["head", *map(self._network.name, range(1, self._network.nodes + 1))]

    def _start(self, name: str, address: str, *words: str) -> None:
        if name not in self._inits:
            self._inits[name] = self._init(name)
        start = ("ray", "start", f"--node-ip-address={address}", *_WITHOUT_NEWS, *words)
        for _ in range(_TRIES):  # `ray start` gives its node 30 s, which a busy machine may exceed
            if self._on(name, *start):
                return
            self._on(name, "ray", "stop", "--force")
        raise AssertionError(self._said(name))

    def _init(self, name: str) -> subprocess.Popen[bytes]:
        """A machine: a network of its own (the head: this process's), and process ids."""
        own = ["unshare", "--uts", "--pid", "--mount-proc", "--kill-child", "--fork"]
        inside = [
            "sh",
            "-c",
            'hostname "$0"; exec "$@"',
            name,
            str(BINARIES / "python"),
            "-c",
            _INIT,
        ]
        network = [] if name == "head" else ["nsenter", f"--net=/run/netns/{name}"]
        return subprocess.Popen([*network, *own, *inside], env=self._env)

    def _on(self, name: str, *words: str) -> bool:
        """Runs a command on a node, to its end; whether it did well."""
        with (self._folder / f"{name}.out").open("ab") as log:
            command = self._command(name, words)
            done = subprocess.run(
                command, env=self._env, stdout=log, stderr=log, timeout=300, check=False
            )
        return done.returncode == 0

    def _said(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text(errors="replace")[-3000:]

    def _spawn(self, name: str, words: Sequence[str], env: dict[str, str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as log:
            command = self._command(name, ["setsid", "--fork", *words])
            subprocess.run(command, env=env, stdout=log, stderr=log, timeout=60, check=True)

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        [first] = until(lambda: psutil.Process(self._inits[name].pid).children(), "a node", 60)
        return ["nsenter", f"--target={first.pid}", "--net", "--uts", "--pid", "--mount", *words]


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


def _is_driver(process: psutil.Process, job: str) -> bool:
    with suppress(psutil.Error):
        configuration = process.environ().get("RAY_JOB_CONFIG_JSON_ENV_VAR", "")
        return job in configuration
    return False


def _parents(node: psutil.Process) -> list[psutil.Process]:
    """A node's keeper and its actor's worker."""
    with suppress(psutil.Error):
        return node.parents()[:2]
    return []


@contextlib.contextmanager
def ray(network: Network, folder: Path) -> Iterator[Ray]:
    """Ray on a network, until the end of the block."""
    folder.mkdir()
    made = Ray(network, folder)
    try:
        made.start()
        yield made
    finally:
        made.close()
