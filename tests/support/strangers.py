"""Where tests of security attack: a running platform with a thief's training and a victim's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import redis

from paceline_backend.server.stack import Stack
from support.waiting import DEADLINE_S, TRAINING_S, until

# A training that lends its environment to whoever asks for it: rank 0 writes it to a file.
SCRIPT = """
import json, os, sys, time
import torch, paceline
import torch.distributed as dist
if os.environ["RANK"] == "0":
    with open(sys.argv[1], "w") as file:
        json.dump(dict(os.environ), file)
torch.set_num_threads(1)
dist.init_process_group("gloo")
class Data(torch.utils.data.Dataset):
    sizes = [1.0 + i % 3 for i in range(64)]
    def __len__(self):
        return len(self.sizes)
    def __getitem__(self, index):
        return torch.ones(3) * index
session = paceline.Session(Data(), global_batch=8)
model = session.wrap(torch.nn.Linear(3, 1))
loader = session.loader()
for _ in session.epochs(100_000):
    for x in loader:
        model(x).mean().backward()
        time.sleep(0.1)
"""
SESAME = "sesame-of-the-run-4711"  # the value of a variable that an operator gives to a run


@dataclass
class Field:
    """Where attacks happen.

    Args:
        stack: server, bus, SQLite and an agent.
        folder: that holds everything; others may enter it.
        mine: the thief's, of the same node, whose rank trains.
        stolen: the environment of its rank.
    """

    stack: Stack
    folder: Path
    theirs: str
    mine: str
    stolen: Mapping[str, str]

    @property
    def token(self) -> str:
        return (self.folder / "data/token").read_text().strip()

    @property
    def bus_password(self) -> str:
        return (self.folder / "data/bus/password").read_text().strip()

    @property
    def secrets(self) -> dict[str, str]:
        """What nobody but the platform's user may learn."""
        return {
            "the admin's token": self.token,
            "the bus's password": self.bus_password,
            "a run's URL of the bus": self.stolen["PACELINE_BUS"].split("@")[0].split(":")[-1],
            "a run's key": self.stolen["PACELINE_KEY"],
            "a variable of a run": SESAME,
        }

    def owner(self) -> redis.Redis:
        """The bus, as the control plane reaches it."""
        return redis.Redis.from_url(self.stack.api("GET", "/version")["bus"])

    def thief(self) -> redis.Redis:
        """The bus, as the thief reaches it."""
        return redis.Redis.from_url(self.stolen["PACELINE_BUS"])

    def run(self, run: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.stack.api("GET", f"/runs/{run}")
        return answer

    def step(self, run: str) -> int:
        step = self.run(run)["step"]
        return -1 if step is None else int(step)

    def planned(self, run: str) -> int:
        """The newest segment that a controller planned; -1: none yet."""
        rows = self.stack.api("GET", f"/runs/{run}/segments?limit=200")
        return max((row["seq"] for row in rows if row["source"] == "controller"), default=-1)

    def goes_on(self, run: str, steps: int = 5) -> None:
        """Fails unless a run trains on, its steps are stored, and the worker plans it."""
        step, planned = self.step(run), self.planned(run)
        until(lambda: self.step(run) >= step + steps, f"further steps of {run}", DEADLINE_S, 0.2)
        until(lambda: self.planned(run) > planned, f"a plan for {run}", DEADLINE_S, 0.2)
        assert self.run(run)["state"] == "running"

    def rejected(self) -> int:
        return int(self.stack.api("GET", "/rejected")["ever"])


def with_runs(stack: Stack, folder: Path) -> Field:
    def start(name: str, nproc: int) -> str:
        body = {
            "script": str(folder / "train.py"),
            "args": [str(folder / f"{name}.json")],
            "nproc": nproc,
            "name": name,
            "env": {"SESAME": SESAME},
        }
        return str(stack.api("POST", "/runs", body)["id"])

    theirs, mine = start("theirs", 2), start("mine", 1)
    made = Field(stack, folder, theirs, mine, {})
    for run in (mine, theirs):
        until(_plans(made, run), f"plans of {run}", TRAINING_S, 0.3)
    made.stolen = json.loads((folder / "mine.json").read_text())
    for name in ("mine.json", "theirs.json"):
        (folder / name).chmod(0o600)
    return made


def _plans(field: Field, run: str) -> Callable[[], bool]:
    def holds() -> bool:
        now = field.run(run)
        assert now["state"] not in ("failed", "stopped"), now["message"]
        return field.planned(run) >= 1

    return holds


def processes(field: Field) -> Iterator[psutil.Process]:
    """The platform's own and its runs'."""
    for process in psutil.Process().children(recursive=True):
        try:
            state_home = process.environ().get("XDG_STATE_HOME", "")
        except psutil.Error:
            continue
        if state_home == str(field.folder / "state"):
            yield process


def stores(field: Field, run: str) -> list[tuple[str, int]]:
    """Addresses at which the launcher and the ranks of a run listen."""
    files = []
    for process in processes(field):
        try:
            if process.environ().get("PACELINE_RUN") == run:
                files += [
                    (c.laddr.ip, c.laddr.port)
                    for c in process.net_connections("inet")
                    if c.status == psutil.CONN_LISTEN
                ]
        except psutil.Error:
            continue
    return files


NOBODY = 65534

# The interpreter may lie where nobody can start it: so its user changes once it runs.
_DROP = """
import encodings.idna, json, os, socket, sys
{first}
os.setgroups([])
os.setgid({user})
os.setuid({user})
os.chdir("/")
"""


def as_nobody(code: str, *arguments: str, first: str = "", **env: str) -> Any:
    """What a program of `nobody` prints as JSON.

    Args:
        code: of the program; has json, os, socket and sys.
        first: what it imports besides, before it becomes `nobody`.
        env: further environment variables.
    """
    begin = _DROP.format(first=first, user=NOBODY)
    done = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(code), *arguments],
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", **env},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
