"""A control plane beside a real Ray, for the contract of engines."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil

from support.machines import Cluster
from support.ray import Ray
from support.waiting import until

_OCCUPY = (
    "import ray, time; ray.init(); "
    "group = ray.util.placement_group([{'CPU': 2}] * 2, 'STRICT_SPREAD', name='occupying'); "
    "group.wait(300); time.sleep(3000)"
)


class RayHarness:
    backend = "ray"

    def __init__(self, cluster: Cluster, daemons: Ray) -> None:
        self.cluster = cluster
        self.ray = daemons
        self.occupying = "occupying"

    def options(self) -> dict[str, Any]:
        return {"setup": f"export PACELINE_DATA={self.cluster.folder / 'data'}"}

    def jobs(self) -> list[str]:
        return [job for job in self.ray.jobs() if not job.startswith("occupying")]

    def occupy(self) -> None:
        number = sum(job["submission_id"] is not None for job in self.ray.ask("GET", "/api/jobs/"))
        self.occupying = f"occupying-{number}"
        self.ray.submit(self.occupying, f'exec python -c "{_OCCUPY}"', {})
        until(lambda: self.ray.groups("CREATED"), "occupied nodes", 180, 0.2)

    def free(self) -> None:
        self.ray.cancel(self.occupying)

    def cancel(self, job: str) -> None:
        self.ray.cancel(job)

    def duplicate(self, job: str) -> None:
        metadata = self.ray.ask("GET", f"/api/jobs/{job}")["metadata"]
        self.ray.submit(f"{job}.again", "exec sleep 3000", metadata)

    def kill_nodes(self, job: str) -> None:
        processes = self.ray.processes(job)
        assert processes
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def vanish(self) -> None:
        self.ray.stop_dashboard()

    def come_back(self) -> None:
        self.ray.start_dashboard()

    def secrets_seen(self, job: str) -> str:
        seen = [self.ray.shown(job)]
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                seen.append(" ".join(process.cmdline()))
        return "\n".join(seen)
