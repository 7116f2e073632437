"""python -m paceline_processes_daemon FOLDER HOST…: starts the jobs in a folder as processes.

Each machine takes two nodes. Jobs get all their nodes at once, in the order in which they came.
Processes go on when the daemon is killed: the next one finds them, also those that the one before
had started and not noted yet.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from paceline_processes import state, write

NODES = 2  # on each machine
_TICK_S = 0.2
_KILL_S = 30.0  # from SIGTERM to SIGKILL


class Daemon:
    def __init__(self, folder: Path, hosts: list[str]) -> None:
        self._folder = folder
        self._machines = dict.fromkeys(hosts, NODES)
        self._stopped_at: dict[str, float] = {}
        folder.mkdir(mode=0o700, exist_ok=True)
        self._lock = (folder / "daemon.lock").open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._unnoted = started()
        write(folder / "machines.json", json.dumps(self._machines))

    def run(self) -> None:
        while True:
            paths = sorted(self._folder.glob("*.job"), key=lambda path: int(path.stem))
            free = self._look_after([path.stem for path in paths])
            for path in paths:
                if state(self._folder, path.stem)["state"] == "queued":
                    self._begin(path.stem, json.loads(path.read_text()), free)
            time.sleep(_TICK_S)

    def _look_after(self, refs: list[str]) -> dict[str, int]:
        """Notes which jobs have ended, and ends those that shall; what is free on each machine."""
        free = dict(self._machines)
        for ref in refs:
            known = state(self._folder, ref)
            stop = (self._folder / f"{ref}.stop").exists()
            if known["state"] == "queued" and stop:
                self._note(ref, "ended", "CANCELLED")
            elif known["state"] == "running":
                left = {pid: at for pid, at in known["processes"].items() if _lives(int(pid), at)}
                if not left:
                    self._note(ref, "ended", "CANCELLED" if stop else "COMPLETED")
                    continue
                if stop:
                    self._end(ref, [int(pid) for pid in left])
                for _, host in left.values():
                    free[host] -= 1
        return free

    def _begin(self, ref: str, job: dict[str, Any], free: dict[str, int]) -> None:
        cordoned = {path.stem for path in self._folder.glob("*.cordon")}
        usable = [host for host in free if host not in cordoned and host not in job["avoid"]]
        # One node on each machine first, as a cluster would.
        places = sorted((NODES - n, host) for host in usable for n in range(free[host], 0, -1))
        if len(places) < job["nodes"]:
            self._note(ref, "queued", "too few machines are free")
            return
        if not Path(job["cwd"]).is_dir():
            self._note(ref, "ended", f"there is no directory {job['cwd']}")
            return
        processes = {}
        for number, (_, host) in enumerate(places[: job["nodes"]]):
            slot = f"{ref}.{number}"
            process, host = self._unnoted.get((job["run"], slot)) or self._start(job, slot, host)
            free[host] -= 1
            processes[str(process.pid)] = (process.create_time(), host)
        self._note(ref, "running", "", processes)

    def _start(self, job: dict[str, Any], slot: str, host: str) -> tuple[psutil.Process, str]:
        secret = {"PACELINE_SERVER": job["server"], "PACELINE_TOKEN": job["token"]}
        words = ["node", "--run", job["run"], "--slot", slot, "--host", host]
        with (self._folder / f"{slot}.log").open("wb") as log:
            node = subprocess.Popen(
                [sys.executable, "-P", "-m", "paceline", *words],
                cwd=job["cwd"],
                env={**os.environ, **job["options"]["env"], **secret},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return psutil.Process(node.pid), host

    def _end(self, ref: str, pids: list[int]) -> None:
        first = ref not in self._stopped_at  # a second SIGTERM would not let ranks end in order
        late = time.monotonic() - self._stopped_at.setdefault(ref, time.monotonic()) > _KILL_S
        if late or first:
            for pid in pids:
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)

    def _note(self, ref: str, kind: str, reason: str, processes: Any = None) -> None:
        said = {"state": kind, "reason": reason, "processes": processes or {}}
        if state(self._folder, ref) != said:
            write(self._folder / f"{ref}.state", json.dumps(said))


def started() -> dict[tuple[str, str], tuple[psutil.Process, str]]:
    """The nodes that run, by run and slot, and their machines. A session's first is no child."""
    known = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            words = process.cmdline()
            ours = words[3:6] == ["paceline", "node", "--run"]
            if ours and os.getsid(process.pid) == process.pid:
                _, run, _, slot, _, host = words[5:11]
                known[run, slot] = (process, host)
    return known


def _lives(pid: int, place: tuple[float, str]) -> bool:
    """Whether this process is there, and not another that got its number."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            process.wait(0)  # ours, unless an earlier daemon started it
            return False
        return abs(process.create_time() - place[0]) < 1
    except (psutil.NoSuchProcess, psutil.TimeoutExpired):
        return False


if __name__ == "__main__":
    Daemon(Path(sys.argv[1]), sys.argv[2:]).run()
