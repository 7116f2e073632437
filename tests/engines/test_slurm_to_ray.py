"""A run begins on a real Slurm and goes on on a real Ray, which share two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from paceline_backend.testing.engines import WAIT_S, assert_ends_exact, start
from support import ray as ray_support
from support import slurm as slurm_support
from support.machines import NEEDS_NETWORKS, TOKEN, Cluster
from support.network import network
from support.ray_harness import RayHarness
from support.slurm_harness import SlurmHarness
from support.waiting import until

pytestmark = [
    pytest.mark.long,  # Ray is there for `make test-engines` only
    pytest.mark.timeout(1200),
    *NEEDS_NETWORKS,
    pytest.mark.skipif(bool(slurm_support.MISSING), reason="Slurm is not installed"),
    pytest.mark.skipif(bool(ray_support.MISSING), reason=ray_support.MISSING),
]


@pytest.fixture
def engines(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[SlurmHarness, RayHarness]]:
    """Both, beside one control plane."""
    folder = tmp_path_factory.mktemp("both")
    with (
        network(2) as nodes,
        slurm_support.slurm(nodes, folder / "slurm") as slurm,
        ray_support.ray(nodes, folder / "ray") as ray,
    ):
        monkeypatch.setenv("SLURM_CONF", str(slurm.configuration))
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", ray.address)
        monkeypatch.setenv("RAY_AUTH_TOKEN", ray.token)
        with Cluster(nodes, folder) as cluster:
            yield SlurmHarness(cluster, slurm), RayHarness(cluster, ray)


def test_a_run_cancelled_on_slurm_goes_on_on_ray(
    engines: tuple[SlurmHarness, RayHarness], request: pytest.FixtureRequest
) -> None:
    """From its checkpoint, as `paceline resume --backend` asks; each sample counts once."""
    slurm, ray = engines
    cluster = slurm.cluster
    for backend in cluster.api("GET", "/backends"):
        if backend["name"] in (slurm.backend, ray.backend):  # for docs/backends/run-against.md
            named = f"{backend['name']} {backend['version']}"
            request.node.user_properties.append(("engine", named))
    run = start(slurm, 2, 2)
    cluster.reaches(run, 8, 2)
    [job] = slurm.jobs()
    slurm.cancel(job)
    ended = cluster.ends(run, WAIT_S)

    def said() -> bool:
        shown = cluster.run(run)
        words = str(shown["message"])
        return shown["state"] == "stopped" and f"job {job} of Slurm" in words

    until(said, f"why it ended, after {ended['message']}", WAIT_S, 0.1)
    assert "CANCELLED" in cluster.run(run)["message"]
    words = ["resume", run, "--yes", "--server", cluster.url, "--backend", "ray"]
    for name, value in ray.options().items():
        words += ["--backend-option", f"{name}={value}"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words],
        env={**os.environ, "PACELINE_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Nodes that Slurm killed may have said nothing: then the next attempt's number is not 1.
    until(lambda: cluster.run(run)["attempt"] > 0, "the attempt on Ray", WAIT_S, 0.1)
    cluster.reaches(run, cluster.run(run)["step"] + 4, 2)
    shown = cluster.run(run)
    assert shown["backend"] == "ray"
    assert ray.jobs() == [shown["backend_jobs"]["jobs"]["0"]]
    assert slurm.jobs() == []
    assert_ends_exact(ray, run)
    first, second = cluster.api("GET", f"/runs/{run}/attempts")
    assert second["step"] > 0, (first, second)
    changes = cluster.api("GET", f"/audit?run={run}&action=run.resume")["items"]
    assert [change["details"]["backend"] for change in changes] == ["ray"]
