"""The contract of engines, over the example. Run it with pytest where both are installed."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from paceline_processes import FOLDER, jobs, state, write
from paceline_processes_daemon import Daemon, started

from paceline_backend.testing.control_plane import ControlPlane, until
from paceline_backend.testing.engines import EngineContract

pytestmark = pytest.mark.timeout(1500)
HOSTS = ("alpha", "beta")


class ProcessesHarness:
    """A daemon of two machines beside a control plane."""

    backend = "processes"

    def __init__(self, cluster: ControlPlane, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.come_back()

    def options(self) -> dict[str, Any]:
        return {"env": {"PACELINE_DATA": str(self.cluster.folder / "data")}}

    def jobs(self) -> list[str]:
        return [job.ref for job in jobs(self.folder) if job.state != "ended"]

    def occupy(self) -> None:
        for host in HOSTS:
            write(self.folder / f"{host}.cordon", "somebody else needs it")

    def free(self) -> None:
        for host in HOSTS:
            (self.folder / f"{host}.cordon").unlink(missing_ok=True)

    def cancel(self, job: str) -> None:
        (self.folder / f"{job}.stop").touch()

    def duplicate(self, job: str) -> None:
        order = json.loads((self.folder / f"{job}.job").read_text())
        write(self.folder / f"{int(job) + 1}.job", json.dumps(order))

    def kill_nodes(self, job: str) -> None:
        for pid in state(self.folder, job)["processes"]:
            os.killpg(int(pid), signal.SIGKILL)

    def vanish(self) -> None:
        self.daemon.kill()
        self.daemon.wait()

    def come_back(self) -> None:
        words = [sys.executable, "-m", "paceline_processes_daemon", str(self.folder), *HOSTS]
        self.daemon = subprocess.Popen(words)
        until((self.folder / "machines.json").exists, "the daemon", 120)

    def secrets_seen(self, job: str) -> str:
        seen = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                seen.append(" ".join(process.cmdline()))
        readable = (path for path in self.folder.iterdir() if path.stat().st_mode & 0o004)
        seen += [path.read_text() for path in readable if self.folder.stat().st_mode & 0o005]
        return "\n".join(seen)


@pytest.fixture(scope="module")
def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessesHarness]:
    """Of all cases: it takes seconds to start."""
    folder = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder / "jobs"))
        with ControlPlane(folder) as cluster:
            harness = ProcessesHarness(cluster, folder / "jobs")
            yield harness
            for job in harness.jobs():
                harness.cancel(job)
            until(lambda: not harness.jobs(), "the end of all jobs")
            harness.vanish()


@pytest.fixture
def harness(shared_harness: ProcessesHarness) -> ProcessesHarness:
    """Without what a case before has left."""
    if shared_harness.daemon.poll() is not None:
        shared_harness.come_back()
    shared_harness.free()
    for job in shared_harness.jobs():
        shared_harness.cancel(job)
    until(lambda: not shared_harness.jobs(), "the end of all jobs")
    return shared_harness


class TestProcesses(EngineContract):
    """What each engine has to do."""


def test_nodes_are_started_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon is killed after it started a job's nodes, and before it noted that."""
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "data"))
    run, folder = secrets.token_hex(6), tmp_path / "jobs"
    secret = {"server": "http://127.0.0.1:9", "token": "pl_1_2"}  # the nodes wait for a server
    place = {"cwd": str(tmp_path), "avoid": [], "options": {"env": {}}}
    job = {"run": run, "nodes": 2, **secret, **place}

    def nodes() -> set[str]:
        return {str(process.pid) for (own, _), (process, _) in started().items() if own == run}

    try:
        first = Daemon(folder, list(HOSTS))
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(Daemon, "_note", lambda *_: 1 / 0)
            first._begin("1", job, dict.fromkeys(HOSTS, 2))
        first._lock.close()
        known = nodes()
        assert len(known) == 2
        Daemon(folder, list(HOSTS))._begin("1", job, dict.fromkeys(HOSTS, 2))
        assert set(state(folder, "1")["processes"]) == nodes() == known
    finally:
        for pid in nodes():
            os.killpg(int(pid), signal.SIGKILL)
