"""A control plane beside a real Slurm, for the contract of engines."""

from __future__ import annotations

import signal
from contextlib import suppress
from typing import Any

import psutil

from support.machines import Cluster
from support.slurm import Slurm
from support.waiting import until


class SlurmHarness:
    backend = "slurm"

    def __init__(self, cluster: Cluster, daemons: Slurm) -> None:
        self.cluster = cluster
        self.slurm = daemons
        self.occupying: str | None = None

    def options(self) -> dict[str, Any]:
        return {
            "setup": f"export PACELINE_DATA={self.cluster.folder / 'data'}",
            "output": str(self.cluster.folder / "job-%j.log"),
        }

    def jobs(self) -> list[str]:
        return [job for job in self.slurm.jobs() if job != self.occupying]

    def occupy(self) -> None:
        words = ("sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null")
        self.occupying = self.slurm.ask(*words, "--wrap=sleep 3000")
        until(lambda: self.occupying in self.slurm.jobs("running"), "occupied nodes", 60, 0.1)

    def free(self) -> None:
        assert self.occupying is not None
        self.slurm.cancel(self.occupying)

    def cancel(self, job: str) -> None:
        self.slurm.cancel(job)

    def duplicate(self, job: str) -> None:
        label = self.slurm.ask("squeue", "--noheader", "--format=%k", f"--jobs={job}")
        self.slurm.ask("sbatch", "--hold", f"--comment={label}", "--wrap=true")

    def kill_nodes(self, job: str) -> None:
        killed = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_JOB_ID") == job:
                    process.send_signal(signal.SIGKILL)
                    killed += 1
        assert killed

    def vanish(self) -> None:
        self.slurm.stop("slurmctld")

    def come_back(self) -> None:
        self.slurm.start_controller()

    def state(self, host: str) -> str:
        return self.slurm.ask("sinfo", "--noheader", f"--nodes={host}", "--format=%T")

    def secrets_seen(self, job: str) -> str:
        seen = [self.slurm.ask("scontrol", "--details", "show", "job", job)]
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                seen.append(" ".join(process.cmdline()))
        return "\n".join(seen)
