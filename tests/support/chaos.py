"""A control plane, a node and a training, and the faults that a seed deals them.

A fault has a coordinate: the step of the run at which it begins. Ranks wait there for it. What
was killed is started again, as an init system would; what was stopped goes on; what was filled is
emptied. A run that has failed is resumed.
"""

from __future__ import annotations

import importlib.util
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from paceline.core.errors import PacelineError
from paceline_backend.server.stack import Stack
from support import chaos_script
from support.postgres import Postgres
from support.waiting import DEADLINE_S, TRAINING_S, until

WORLD = 2
EMULATED = {"a_s": [0.002, 0.003], "b_s": [0.02, 0.02]}  # steps of some 40 ms
HELD_S = (0.5, 4.0)  # how long a process is stopped, the database is locked or the disk is full
AFTER = 3  # steps that ranks may make while a fault lasts, and again when it is over
APART = 2 * AFTER + 1  # steps from one fault to the next, at least
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Fault:
    """One fault: what happens to whom, from which step of the run on, and for how long."""

    step: int
    kind: str  # a key of `Chaos.kinds`
    held_s: float


@dataclass(frozen=True)
class Outcome:
    """What became of a fault. Seconds count from its end."""

    fault: Fault
    trained_s: float  # until the ranks made a step that they could not make before
    shown_s: float  # until REST showed that step


def dealt(seed: int, count: int, kinds: list[str]) -> list[Fault]:
    """Faults in the order of their steps: each kind in turn, shuffled, so that none is left out."""
    dice = random.Random(seed)
    order: list[str] = []
    while len(order) < count:
        order += dice.sample(kinds, len(kinds))
    step = 2
    faults = []
    for kind in order[:count]:
        faults.append(Fault(step, kind, dice.uniform(*HELD_S)))
        step += dice.randint(APART, APART + 4)
    return faults


@contextmanager
def small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    path.mkdir()
    size = f"size={megabytes}m"
    subprocess.run(["mount", "-t", "tmpfs", "-o", size, "paceline-test", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


@dataclass
class Chaos:
    """A running stack whose parts can be hurt.

    Args:
        directory: of the training: what ranks write down, and checkpoints. Not on the small disk.
        postgres: the database's server; None: SQLite in the stack's data.
        clock: the file that tells the node's processes their time; None: they have the true one.
    """

    stack: Stack
    directory: Path
    postgres: Postgres | None = None
    clock: Path | None = None
    run: str = ""
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def kinds(self) -> dict[str, Callable[[Fault], None]]:
        known: dict[str, Callable[[Fault], None]] = {}
        for name in ("rank", "launcher", "agent", "web", "worker", "bus"):
            known[f"kill {name}"] = lambda _, name=name: self._kill(name)
            known[f"stop {name}"] = lambda fault, name=name: self._freeze(name, fault.held_s)
        known["lock database"] = lambda fault: self._lock(fault.held_s)
        known["fill disk"] = lambda fault: self._fill(fault.held_s)
        if self.postgres is not None:
            known["kill postgres"] = lambda _: self._kill_postgres()
            known["stop postgres"] = lambda fault: self._freeze("postgres", fault.held_s)
        if self.clock is not None:
            known["step clock"] = lambda fault: self._step_clock(fault)
        return known

    def start(self, epochs: int, policy: str) -> None:
        self.directory.mkdir()
        self._allow(0)
        body = {
            "script": chaos_script.__file__,
            "args": [str(self.directory), str(epochs)],
            "nproc": WORLD,
            "policy": policy,
            "max_restarts": 1000,
            "env": {"PACELINE_EMULATE": json.dumps(EMULATED)},
        }
        self.run = str(self.stack.api("POST", "/runs", body)["id"])

    def suffer(self, fault: Fault) -> None:
        """Waits for the fault's step, lets it happen, and waits until all is well again."""
        self._allow(fault.step)
        reached = f"step {fault.step} of {fault}"
        self._tend_until(lambda: self.step() >= fault.step, reached)
        self._allow(fault.step + AFTER)  # they train while it lasts
        self.kinds[fault.kind](fault)
        ended = time.monotonic()
        later = fault.step + AFTER + 1  # no rank could make that step before the fault's end
        self._allow(fault.step + 2 * AFTER)
        self._tend_until(lambda: self.step() >= later, f"step {later} after {fault}")
        trained_s = time.monotonic() - ended
        self._tend_until(lambda: self._shows(later), f"REST to show step {later} after {fault}")
        self.outcomes.append(Outcome(fault, trained_s, time.monotonic() - ended))

    def finish(self) -> dict[str, Any]:
        self._allow(sys.maxsize)
        self._tend_until(self._over, "the end of the run")
        return dict(self.stack.api("GET", f"/runs/{self.run}"))

    def _allow(self, step: int) -> None:
        part = self.directory / "allowed.new"
        part.write_text(str(step))
        part.replace(self.directory / "allowed")

    def step(self) -> int:
        """The newest step that rank 0 has made; -1 before the first."""
        with suppress(OSError):
            last = (self.directory / "steps-0").read_bytes().splitlines()[-1:]
            if last:
                return int(json.loads(last[0])[2])
        return -1

    def _tend_until(
        self, condition: Callable[[], Any], what: str, timeout_s: float = TRAINING_S
    ) -> None:
        """Waits, and meanwhile starts again what a fault has ended."""

        def tended() -> Any:
            if value := condition():
                return value
            self._tend()
            return None

        until(tended, what, timeout_s, _PAUSE_S)

    def _tend(self) -> None:
        assert self.stack.agent is not None
        if self.stack.agent.poll() is not None:
            self.stack.start_agent()
        with suppress(PacelineError):
            run = self.stack.api("GET", f"/runs/{self.run}")
            if run["state"] in ("failed", "stopped"):
                self.stack.api("POST", f"/runs/{self.run}/resume", {"max_restarts": 1000})

    def _over(self) -> bool:
        with suppress(PacelineError):
            return bool(self.stack.api("GET", f"/runs/{self.run}")["state"] == "finished")
        return False

    def _shows(self, step: int) -> bool:
        with suppress(PacelineError):
            return step in self.stack.api("GET", f"/runs/{self.run}/steps?points=5000")["step"]
        return False

    def _kill(self, name: str) -> None:
        process = self._process(name)
        process.send_signal(signal.SIGKILL)
        psutil.wait_procs([process], timeout=DEADLINE_S)

    def _freeze(self, name: str, held_s: float) -> None:
        process = self._process(name)
        process.suspend()
        time.sleep(held_s)
        with suppress(psutil.NoSuchProcess):
            process.resume()

    def _fill(self, held_s: float) -> None:
        """Leaves no byte on the disk of the stack's data."""
        filler = self.stack.data / "filler"
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"\0" * 4096)
        time.sleep(held_s)
        filler.unlink()

    def _lock(self, held_s: float) -> None:
        if self.postgres is not None:
            engine = sa.create_engine(str(self.stack.database))
            with engine.connect() as connection:
                connection.execute(sa.text("LOCK TABLE worker_steps IN ACCESS EXCLUSIVE MODE"))
                time.sleep(held_s)
            engine.dispose()
            return
        engine = sa.create_engine(
            f"sqlite:///{self.stack.data / 'paceline.db'}", connect_args={"timeout": DEADLINE_S}
        )
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN EXCLUSIVE")
            time.sleep(held_s)
        engine.dispose()

    def _kill_postgres(self) -> None:
        assert self.postgres is not None
        self.postgres.kill()
        self.postgres.start_again()

    def _step_clock(self, fault: Fault) -> None:
        assert self.clock is not None
        seconds = random.Random(fault.step).choice([-3600, -20, 20, 3600])
        self.clock.write_text(f"{seconds:+d}s\n")

    def _process(self, name: str) -> psutil.Process:
        """The process that has this part; waits until there is one."""
        return until(
            lambda: self._find(name), f"a process that is the {name}", DEADLINE_S, _PAUSE_S
        )

    def _find(self, name: str) -> psutil.Process | None:
        assert self.stack.agent is not None
        assert self.stack.server is not None
        if name == "agent":
            return psutil.Process(self.stack.agent.pid)
        if name == "postgres":
            assert self.postgres is not None
            return psutil.Process(self.postgres.pid)
        parent = self.stack.agent if name in ("rank", "launcher") else self.stack.server
        says = {
            "rank": "chaos_script.py",
            "launcher": "paceline.node.elastic.launcher",
            "web": "paceline-web",
            "worker": "paceline-worker",
            "bus": "",
        }[name]
        processes = []
        with suppress(psutil.Error):
            for child in psutil.Process(parent.pid).children(recursive=True):
                with suppress(psutil.Error):
                    if child.status() == psutil.STATUS_ZOMBIE:
                        continue
                    words = child.cmdline()
                    if name == "bus":
                        right = "valkey" in child.name() or "redis" in child.name()
                    elif name == "rank":
                        right = "RANK" in child.environ() and says in " ".join(words)
                    elif name == "launcher":
                        right = says in words
                    else:
                        right = child.name() == says
                    if right:
                        processes.append(child)
        return random.Random(len(self.outcomes)).choice(processes) if processes else None


def environment_with_clock(clock: Path) -> dict[str, str]:
    """Variables by which processes read the offset of their clock from a file, each second."""
    package = importlib.util.find_spec("libfaketime")
    assert package is not None
    assert package.origin is not None
    library = next(Path(package.origin).parent.rglob("libfaketime.so.1"))
    clock.write_text("+0s\n")
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def own(directory: Path) -> dict[int, list[tuple[int, int, int, list[int]]]]:
    """What each rank itself wrote down: [process, epoch, step, samples] for each step made."""
    return {
        rank: [
            tuple(json.loads(line))
            for line in (directory / f"steps-{rank}").read_text().splitlines()
        ]
        for rank in range(WORLD)
    }


def quantile(values: list[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
