"""Runs on a real Slurm: its daemons on network namespaces, and a control plane beside them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InputError
from paceline_backend.testing.engines import (
    SCRIPT,
    EngineContract,
    assert_ends_exact,
    start,
)
from support.machines import NEEDS_NETWORKS, TOKEN, Cluster
from support.network import network
from support.slurm import MISSING, slurm
from support.slurm_harness import SlurmHarness
from support.waiting import until

pytestmark = [
    *NEEDS_NETWORKS,
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)}"),
]


@pytest.fixture(scope="module")
def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmHarness]:
    """Of all tests: it takes seconds to start."""
    folder = tmp_path_factory.mktemp("slurm")
    with (
        pytest.MonkeyPatch.context() as patch,
        network(2) as nodes,
        slurm(nodes, folder / "daemons") as daemons,
    ):
        patch.setenv("SLURM_CONF", str(daemons.configuration))
        with Cluster(nodes, folder) as cluster:
            yield SlurmHarness(cluster, daemons)


@pytest.fixture
def harness(shared_harness: SlurmHarness) -> SlurmHarness:
    """Without what a test before has left."""
    shared_harness.slurm.clean()
    return shared_harness


class TestSlurm(EngineContract):
    """What each engine has to do."""


def test_what_slurm_refuses_fails_the_run(harness: SlurmHarness) -> None:
    with pytest.raises(InputError, match=r"backend_options.partition"):
        harness.cluster.api("POST", "/runs", body(partition=3))
    run = str(harness.cluster.api("POST", "/runs", body(partition="nowhere"))["id"])
    ended = harness.cluster.ends(run)
    assert ended["state"] == "failed"
    assert "invalid partition" in ended["message"]
    assert not harness.jobs()


@pytest.mark.long
def test_a_cordon_drains_the_node_with_its_reason(harness: SlurmHarness) -> None:
    """Also after the run, by the name of the node that it had there; another's drain stays."""
    cluster = harness.cluster
    run = start(harness, 1, 1)
    cluster.reaches(run, 2, 1)
    node = cluster.run(run)["node"]
    host = node_of(harness, node)["host"]
    assert host in (cluster.network.name(1), cluster.network.name(2))
    cluster.api("PUT", f"/nodes/{node}/cordon", {"reason": 'its "disk" is slow; 100%'})
    until(lambda: settled(harness, node), "Slurm's drain", 60, 0.1)
    assert 'its "disk" is slow; 100%' in harness.slurm.ask("sinfo", "-R", "--format=%100E|%N")
    assert_ends_exact(harness, run)
    until(lambda: harness.state(host) == "drained", "the drained node", 60, 0.1)
    assert not node_of(harness, node)["alive"]
    cluster.api("DELETE", f"/nodes/{node}/cordon")
    until(lambda: harness.state(host) == "idle", "the idle node", 60, 0.1)
    until(lambda: node_of(harness, node) is None, "the node to be of no interest", 60, 0.1)
    assert host not in harness.slurm.ask("sinfo", "-R", "--noheader")

    harness.slurm.ask("scontrol", "update", f"NodeName={host}", "State=DRAIN", "Reason=a fan")
    for action, body in (("PUT", {"reason": "its disk is slow"}), ("DELETE", None)):
        cluster.api(action, f"/nodes/{node}/cordon", body)
        until(lambda: settled(harness, node), "Slurm to be told", 60, 0.1)
        assert harness.state(host) == "drained"
        assert "a fan" in harness.slurm.ask("sinfo", "-R")
    harness.slurm.ask("scontrol", "update", f"NodeName={host}", "State=RESUME")


@pytest.mark.long
def test_a_node_is_replaced(harness: SlurmHarness) -> None:
    """The other joins before it leaves, though the run has all its nodes."""
    cluster = harness.cluster
    run = start(harness, 2, 2)
    cluster.reaches(run, 8, 2)
    slow = next(each for each in nodes_of(harness, run) if not each["host"])["node"]
    host = node_of(harness, slow)["host"]
    body = {"cordon": True, "why": "it is slow"}
    cluster.api("POST", f"/runs/{run}/nodes/{slow}/replace", body)
    until(lambda: replacement(harness, run)["state"] == "done", "the replacement", 300, 0.5)
    other = replacement(harness, run)["other"]
    assert node_of(harness, other)["host"] not in (host, None)
    rows = {row["node"]: row for row in nodes_of(harness, run)}
    assert rows[slow]["leaving"]
    assert rows[other]["replaces"] == slow
    assert harness.state(host) in ("draining", "drained")
    cluster.reaches(run, cluster.run(run)["step"] + 4, 2)
    assert_ends_exact(harness, run)
    cluster.api("DELETE", f"/nodes/{slow}/cordon")
    until(lambda: harness.state(host) == "idle", "the idle node", 60, 0.1)


@pytest.mark.long
def test_a_run_is_asked_for_in_a_terminal(harness: SlurmHarness) -> None:
    """Its script is not there: that it is followed to its end, shows in a second."""
    words = [sys.executable, "-m", "paceline", "run", "--server", harness.cluster.url]
    words += ["--backend", "slurm"]
    for name, value in harness.options().items():
        words += ["--backend-option", f"{name}={value}"]
    done = subprocess.run(
        [*words, "nothing.py"],
        env={**os.environ, "PACELINE_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "the run: failed" in done.stderr
    assert "there is no file" in done.stderr
    assert "PACELINE_DATA" in str(harness.cluster.api("GET", "/runs")["items"][0])


@pytest.mark.long
def test_a_job_of_ones_own_is_a_run(harness: SlurmHarness) -> None:
    """Nobody asked the control plane for the run, and it submits nothing."""
    cluster = harness.cluster
    job = own_job(harness)
    run = adopted(harness)
    cluster.reaches(run, 8, 2)
    shown = cluster.run(run)
    assert (shown["backend"], shown["backend_jobs"], shown["nodes_min"]) == ("adopted", None, 2)
    hosts = {cluster.network.name(1), cluster.network.name(2)}
    assert {row["node"] for row in nodes_of(harness, run)} == {
        f"{host}-{job}.0.{number}.{run}" for number, host in enumerate(sorted(hosts))
    }
    assert harness.jobs() == [job]
    cluster.api("POST", f"/runs/{run}/policy", {"policy": "chronica"})
    until(lambda: planned(harness, run), "the other policy", 300, 0.1)
    logs = cluster.api("GET", f"/runs/{run}/logs")["logs"]
    assert {0, 1} <= {log["rank"] for log in logs}
    assert_ends_exact(harness, run)
    assert_ended(harness, job, "COMPLETED")


@pytest.mark.long
@pytest.mark.parametrize("who", ["the control plane", "Slurm"])
def test_a_job_of_ones_own_is_stopped(harness: SlurmHarness, who: str) -> None:
    cluster = harness.cluster
    job = own_job(harness)
    run = adopted(harness)
    cluster.reaches(run, 4, 2)
    if who == "Slurm":
        harness.slurm.ask("scancel", job)
        ended = cluster.ends(run)
        # Killed nodes may have said nothing, and nobody asks Slurm about jobs that are not ours.
        assert ended["state"] in ("stopped", "failed"), ended
        assert_ended(harness, job, "CANCELLED")
    else:
        cluster.api("POST", f"/runs/{run}/stop", {"force": True})
        assert cluster.ends(run)["state"] == "stopped"
        assert_ended(harness, job, "FAILED")
    assert harness.jobs() == []


def own_job(harness: SlurmHarness) -> str:
    """Submits a job as its user would; its number."""
    cluster = harness.cluster
    folder = Path(tempfile.mkdtemp(prefix="shared-", dir=cluster.folder))
    words = [sys.executable, "-P", "-m", "paceline", "node", "--server", cluster.url]
    words += ["--name", f"own-{folder.name}", "--policy", "bsp"]
    words += [str(SCRIPT), str(folder), "1000", "2", "0.1"]
    script = folder / "job.sh"
    script.write_text(
        f"#!/bin/sh\nexport PACELINE_TOKEN={TOKEN} PACELINE_DATA={folder / 'data'}\n"
        f"srun {shlex.join(words)}\n"
    )
    size = ("--nodes=2", "--ntasks-per-node=1")
    output = f"--output={cluster.folder / 'job-%j.log'}"
    return harness.slurm.ask("sbatch", "--parsable", *size, output, str(script))


def adopted(harness: SlurmHarness) -> str:
    """The newest run, once it is that of `own_job`."""

    def newest() -> str | None:
        runs = harness.cluster.api("GET", "/runs?limit=1")["items"]
        own = runs and runs[0]["name"].startswith("own-") and runs[0]["ended_at"] is None
        return runs[0]["id"] if own else None

    return str(until(newest, "the adopted run", 300, 0.1))


def planned(harness: SlurmHarness, run: str) -> bool:
    """Whether the newest policy plans."""
    newest = harness.cluster.api("GET", f"/runs/{run}/switches")[-1]
    return newest["effective_step"] is not None


def assert_ended(harness: SlurmHarness, job: str, state: str) -> None:
    """Waits until Slurm says how a job ended."""
    words = ("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")
    left = ("RUNNING", "COMPLETING")
    until(lambda: harness.slurm.ask(*words) not in left, "the job's end", 120, 0.1)
    assert harness.slurm.ask(*words) == state


def body(**options: Any) -> dict[str, Any]:
    """A run whose script no node has."""
    script = str(Path(__file__).parent / "nothing.py")
    return {"script": script, "nproc": 1, "backend": "slurm", "backend_options": options}


def node_of(harness: SlurmHarness, node: str) -> Any:
    """A node as it is listed; None: it is not."""
    listed = harness.cluster.api("GET", "/nodes")
    return next((each for each in listed if each["id"] == node), None)


def settled(harness: SlurmHarness, node: str) -> bool:
    """Whether Slurm knows of a node's cordon, or of its end."""
    shown = node_of(harness, node)
    if shown is None or shown["in_engine"] is None:
        return True
    assert shown["in_engine"]["refusal"] is None
    return shown["in_engine"]["told_at"] is not None


def nodes_of(harness: SlurmHarness, run: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = harness.cluster.api("GET", f"/runs/{run}/nodes")
    return rows


def replacement(harness: SlurmHarness, run: str) -> dict[str, Any]:
    """The only one of a run."""
    [made] = harness.cluster.api("GET", f"/runs/{run}/replacements")
    assert made["state"] != "failed"
    return dict(made)
