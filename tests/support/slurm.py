"""A real Slurm on a network of namespaces: munged, slurmctld, and a slurmd on each node."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from support.daemons import Daemons
from support.network import Network
from support.waiting import until

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
MISSING = [name for name in COMMANDS if not shutil.which(name)]

_CONFIGURATION = """
ClusterName=paceline
SlurmctldHost={host}({head})
SlurmctldPort=27817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
MessageTimeout=5
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,bf_interval=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm(Daemons):
    """The daemons. Jobs of a slurmd that ends go on.

    Args:
        network: each of its nodes is a node of Slurm, with two processors.
        folder: for everything that they write.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        self._network = network
        self.configuration = folder / "slurm.conf"
        super().__init__(folder, {"SLURM_CONF": str(self.configuration)})

    def start(self) -> None:
        """Starts all daemons, and waits until all nodes are idle."""
        self._folder.mkdir()
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        numbers = range(1, self._network.nodes + 1)
        lines = [
            f"NodeName={self._network.name(n)} NodeAddr={self._network.address(n)} CPUs=2 "
            "RealMemory=1000 State=UNKNOWN Port=27820"
            for n in numbers
        ]
        self.configuration.write_text(
            _CONFIGURATION.format(
                host=socket.gethostname(),
                head=self._network.head,
                folder=self._folder,
                nodes="\n".join(lines),
            )
        )
        places = {name: self._folder / f"munge.{name}" for name in ("socket", "pid", "seed")}
        self._spawn(
            "munged",
            [
                *("munged", "--foreground", "--force", f"--key-file={key}"),
                *(f"--{name}-file={path}" for name, path in places.items() if name != "socket"),
                f"--socket={places['socket']}",
                f"--log-file={self._folder / 'munge.log'}",
            ],
        )
        until(places["socket"].exists, "munged", 60)
        self.start_controller()
        for node in numbers:
            name = self._network.name(node)
            # Not `ip netns exec`: it hides /sys/fs/cgroup, which slurmd wants to see.
            inside = f"hostname {name}; exec slurmd -D -N {name}"
            net = f"--net=/run/netns/{name}"
            self._spawn(name, ["nsenter", net, "unshare", "--uts", "sh", "-c", inside])
        until(lambda: self._idle() == len(numbers), "idle nodes", 120, 0.1)

    def start_controller(self) -> None:
        """Starts slurmctld, again with what it knew."""
        self._spawn("slurmctld", ["slurmctld", "-D"])

    def ask(self, *words: str) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(
            words, env=self._env, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def clean(self) -> None:
        """Ends all jobs, and starts slurmctld if it is away."""
        if "slurmctld" not in self.processes:
            self.start_controller()
        until(self._answers, "slurmctld", 60, 0.1)
        for job in self.jobs():
            self.cancel(job)
        until(lambda: self._idle() == self._network.nodes, "idle nodes", 120, 0.1)

    def cancel(self, job: str) -> None:
        """Ends a job, unless it has ended by itself just now."""
        for words in (("scancel", "--signal=KILL", job), ("scancel", job)):
            done = subprocess.run(
                words, env=self._env, capture_output=True, text=True, timeout=60, check=False
            )
            over = "nvalid job id" in done.stderr or "already complet" in done.stderr
            assert done.returncode == 0 or over, done.stderr

    def jobs(self, states: str = "pending,running,completing") -> list[str]:
        """Numbers of jobs, in the order of their submission."""
        words = ("squeue", "--noheader", "--format=%i", "--sort=i", f"--states={states}")
        return self.ask(*words).split()

    def _answers(self) -> bool:
        done = subprocess.run(
            ["scontrol", "ping"], env=self._env, capture_output=True, timeout=60, check=False
        )
        return done.returncode == 0

    def _idle(self) -> int:
        if not self._answers():
            return 0
        return sum(
            map(int, self.ask("sinfo", "--noheader", "--format=%D", "--states=idle").split())
        )


@contextlib.contextmanager
def slurm(network: Network, folder: Path) -> Iterator[Slurm]:
    """Slurm on a network, until the end of the block."""
    made = Slurm(network, folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
