"""Runs on a real Ray: a head and two nodes on network namespaces, and a control plane."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.core.errors import InputError
from paceline_backend import backends
from paceline_backend.backends.ray import RayOptions
from paceline_backend.testing.engines import WAIT_S, EngineContract, assert_ends_exact, start
from support.machines import NEEDS_NETWORKS, Cluster
from support.network import network
from support.ray import MISSING, ray
from support.ray_harness import RayHarness
from support.waiting import until

pytestmark = [
    pytest.mark.long,  # Ray is there for `make test-engines` only
    pytest.mark.timeout(1200),
    *NEEDS_NETWORKS,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture(scope="module")
def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHarness]:
    """Of all tests: it takes a while to start."""
    folder = tmp_path_factory.mktemp("ray")
    with (
        pytest.MonkeyPatch.context() as patch,
        network(2) as nodes,
        ray(nodes, folder / "daemons") as daemons,
    ):
        patch.setenv("RAY_API_SERVER_ADDRESS", daemons.address)
        patch.setenv("RAY_AUTH_TOKEN", daemons.token)
        with Cluster(nodes, folder) as cluster:
            yield RayHarness(cluster, daemons)


@pytest.fixture
def harness(shared_harness: RayHarness) -> RayHarness:
    """Without what a test before has left."""
    shared_harness.ray.clean()
    return shared_harness


class TestRay(EngineContract):
    """What each engine has to do."""


def test_what_ray_refuses_fails_the_run(harness: RayHarness) -> None:
    with pytest.raises(InputError, match=r"backend_options.memory"):
        harness.cluster.api("POST", "/runs", body(memory="much"))
    run = harness.cluster.api("POST", "/runs", body(runtime_env={"pip": 3}))["id"]
    ended = harness.cluster.ends(str(run))
    assert ended["state"] == "failed"
    assert "FAILED: " in ended["message"]
    assert "runtime_env" in ended["message"]
    assert not harness.jobs()


def test_nodes_end_by_themselves_and_leave_before_they_are_killed(
    harness: RayHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another command than ours: what Ray and the driver do with it."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", harness.ray.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", harness.ray.token)
    script = tmp_path / "node.sh"
    script.write_text(_NODE)
    options = RayOptions(setup=f"cd {tmp_path}", paceline=f"sh {script}")
    order = backends.Order("paceline.test.x.0.0", "x", 2, 1, "/", options, "http://head", "pl_x")
    engine = backends.engine("ray")
    assert engine is not None

    def job() -> backends.Job:
        [job] = engine.look("paceline.test.")
        return job

    assert engine.submit(order) == engine.submit(order) == order.label
    first, second = tmp_path / "x.0.0.0", tmp_path / "x.0.0.1"
    until(lambda: first.exists() and second.exists(), "two nodes", WAIT_S, 0.1)
    until(lambda: job().state == "running", "a job that runs", WAIT_S, 0.2)
    [killed] = [each for each in psutil.process_iter() if "x.0.0.1" in command(each)]
    killed.kill()
    logs = f"/api/jobs/{order.label}/logs"
    said = "Node 1 ended: exit code 137"
    until(lambda: said in harness.ray.ask("GET", logs)["logs"], "its end", WAIT_S, 0.2)
    assert job().state == "running"
    assert [each for each in psutil.process_iter() if "x.0.0.0" in command(each)]
    engine.stop([order.label])
    until(lambda: job().state == "ended", "the end of the job", WAIT_S, 0.2)
    assert Path(f"{first}.left").exists()


def test_machines_to_avoid_are_not_given(
    harness: RayHarness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node says which machine it is on, as Ray calls it."""
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", harness.ray.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", harness.ray.token)
    script = tmp_path / "node.sh"
    script.write_text(_NODE)
    options = RayOptions(setup=f"cd {tmp_path}", paceline=f"sh {script}")
    engine = backends.engine("ray")
    assert engine is not None

    def host(part: int, *avoid: str) -> str:
        order = backends.Order(
            *(f"paceline.avoid.x.0.{part}", "x", 1, 1, "/", options, "http://head", "pl_x", avoid)
        )
        engine.submit(order)
        node = tmp_path / f"x.0.{part}.0"
        until(node.exists, "a node", WAIT_S, 0.1)
        return node.read_text().strip()

    first = host(0)
    second = host(1, first)
    assert second not in ("", first)
    assert host(2, second) == first


def test_a_job_that_no_node_has_room_for_waits_and_says_so(harness: RayHarness) -> None:
    run = harness.cluster.api("POST", "/runs", body(cpus_per_node=50))["id"]

    def waits() -> bool:
        shown = harness.cluster.run(str(run))
        return shown["state"] == "queued" and "1 node with 50 CPU" in shown["message"]

    until(waits, "why it waits", WAIT_S, 0.2)
    harness.cluster.api("POST", f"/runs/{run}/stop")
    assert harness.cluster.ends(str(run))["state"] == "stopped"


def test_a_planned_stop_of_all_of_ray(harness: RayHarness) -> None:
    run = start(harness, 2, 2)
    harness.cluster.reaches(run, 8, 2)
    harness.ray.stop()
    ended = harness.cluster.ends(run)
    # They said that they leave. If the host of the rendezvous was first, the other is left behind
    # for a moment, or for longer.
    first = {
        "failed": "2 nodes are needed",
        "stopped": "the agent was stopped",
    }
    assert first[ended["state"]] in ended["message"], ended
    assert not _backend(harness)["reachable"]
    harness.ray.start()
    until(lambda: _backend(harness)["reachable"], "Ray", WAIT_S, 0.2)
    harness.cluster.api("POST", f"/runs/{run}/resume")
    until(lambda: harness.cluster.run(run)["attempt"] > 0, "the next attempt", WAIT_S, 0.1)
    assert_ends_exact(harness, run)


# Notes that it is there, and where it was asked to leave, that it did.
_NODE = """
name=$5
trap 'touch "$name.left"; exit 3' TERM
echo "$7" >"$name.part"; mv "$name.part" "$name"
for _ in $(seq 10000); do sleep 0.1; done
"""


def _backend(harness: RayHarness) -> dict[str, Any]:
    known = harness.cluster.api("GET", "/backends")
    return next(dict(each) for each in known if each["name"] == "ray")


def command(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def body(**options: Any) -> dict[str, Any]:
    """A run whose script no node has."""
    script = str(Path(__file__).parent / "nothing.py")
    return {"script": script, "nproc": 1, "backend": "ray", "backend_options": options}
