"""A real server with nodes that say they are slow, and with an engine, as the documentation has it.

The engine is `examples/backend`, whose machines somebody else needs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.testing.control_plane import ControlPlane
from support.node import paceline
from support.scripted import Nodes, Training, answering
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "backend"
SCRIPT = ROOT / "tests" / "support" / "hanging_script.py"
MACHINES = ("alpha", "beta")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ControlPlane]:
    """It knows the example engine, and a Ray that does not answer."""
    installed = folder / "site" / "paceline_processes-0.1.0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: paceline-processes\n")
    entry = "[paceline.backends]\nprocesses = paceline_processes:Processes\n"
    (installed / "entry_points.txt").write_text(entry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{installed.parent}{os.pathsep}{EXAMPLE}")
        patch.setenv("PACELINE_PROCESSES", str(folder / "jobs"))
        patch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")
        with ControlPlane(folder) as control_plane:
            yield control_plane


@pytest.fixture(scope="module")
def nodes(server: ControlPlane) -> Iterator[Nodes]:
    with answering(server) as made:
        yield made


# Nodes that are slow


def replaced(training: Training) -> list[dict[str, Any]]:
    rows = training.get("/audit")["items"]
    return [row for row in rows if row["action"] == "run.replace"]


def slow_rows(nodes: Nodes, node: str) -> list[dict[str, Any]]:
    return list(nodes.server.api("GET", f"/nodes/{node}/history")["slow"])


def test_a_slow_node_is_named_and_replaced_only_if_that_is_allowed(nodes: Nodes) -> None:
    nodes.add("a1", "a2", "a3")
    allowed = Training(nodes, spares=1, replace_slow_nodes=True)
    nodes.add("b1", "b2", "b3")
    forbidden = Training(nodes, spares=1)
    nodes.add("c1", "c2", "c3")
    without = Training(nodes, spares=1, replace_slow_nodes=True)
    [cordoned] = {"c1", "c2", "c3"} - set(without.placement)
    nodes.server.api("PUT", f"/nodes/{cordoned}/cordon", {"reason": "its disk is slow"})
    slow = {training.placement[-1]: training for training in (allowed, forbidden, without)}
    [spare] = {"a1", "a2", "a3"} - set(allowed.placement)
    for node, training in slow.items():
        training.train(60, node)
        verdict = training.get("/attribution")
        assert (verdict["cause"], verdict["node"], verdict["ranks"]) == ("node", node, [2, 3])
        assert 2.7 < verdict["factor"] < 3.3
        assert node in verdict["words"]
        assert [worker["on_node"] for worker in verdict["workers"]] == training.placement
    for node, training in slow.items():
        [row] = until(
            lambda node=node: slow_rows(nodes, node), f"a verdict of {node}", TRAINING_S, 0.2
        )
        assert row["run"] == training.run
        assert row["ended_at"] is None or training is allowed, "only that one is replaced"
        assert 2.7 < row["factor"] < 3.3
        until(
            lambda t=training: t.get("/attribution")["saving"],
            f"a forecast of {node}",
            TRAINING_S,
            0.2,
        )
        saving = training.get("/attribution")["saving"]
        assert 0.4 < saving["saving_low"] <= saving["saving"] <= saving["saving_high"] < 0.8
        assert not replaced(training), "no verdict has held for 100 steps"
    for node, training in slow.items():
        training.train(130, node)
    [change] = until(lambda: replaced(allowed), "the spare to be used", TRAINING_S, 0.2)
    assert change["who"] == "the control plane"
    bad = allowed.placement[-1]
    assert bad in change["why"]
    [row] = allowed.get("/replacements")
    assert (row["node"], row["other"], row["state"]) == (bad, spare, "waiting")
    shown = {node["id"]: node for node in nodes.server.api("GET", "/nodes")}
    assert shown[bad]["cordoned"] is None
    for training in (forbidden, without):
        training.train(20, *slow)
        assert not replaced(training)
        assert training.get("/replacements") == []
    forbidden.train(130)
    until(
        lambda: slow_rows(nodes, forbidden.placement[-1])[0]["ended_at"],
        "the verdict's end",
        TRAINING_S,
        0.2,
    )
    assert forbidden.get("/attribution")["node"] is None


# An engine


@pytest.fixture(scope="module")
def daemon(server: ControlPlane, folder: Path) -> Iterator[Path]:
    """The engine's folder. Somebody else needs its machines."""
    jobs = folder / "jobs"
    words = [sys.executable, "-m", "paceline_processes_daemon", str(jobs), *MACHINES]
    process = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(EXAMPLE)})
    until((jobs / "machines.json").exists, "the daemon")
    for machine in MACHINES:
        (jobs / f"{machine}.cordon").write_text("somebody else needs it")
    yield jobs
    process.kill()
    process.wait()


def queue(server: ControlPlane, backend: str = "processes", **fields: Any) -> str:
    body = {"script": "/shared/train.py", "nproc": 1, "backend": backend, "cwd": str(EXAMPLE)}
    return str(server.api("POST", "/runs", body | fields)["id"])


def waits(server: ControlPlane, run: str, why: str) -> dict[str, Any]:
    def queued() -> dict[str, Any] | None:
        now = server.run(run)
        assert now["state"] in ("pending", "queued"), now["message"]
        return now if why in (now["message"] or "") else None

    try:
        return until(queued, f"{why}", 30, 0.2)
    except AssertionError as error:
        raise AssertionError(f"{why}: {server.run(run)}") from error


def test_a_queued_run_says_why_and_is_stopped_at_once(server: ControlPlane, daemon: Path) -> None:
    run = queue(server, nodes_min=2, nodes_max=2)
    now = waits(server, run, "too few machines are free")
    assert now["state"] == "queued"
    [job] = now["backend_jobs"]["jobs"].values()
    assert now["backend_jobs"] == {"launch": 0, "jobs": {"0": job}}
    server.api("POST", f"/runs/{run}/stop", {})
    assert server.run(run)["state"] == "stopped"
    until((daemon / f"{job}.stop").exists, "the queue to be left", 60, 0.1)


def test_a_queued_run_whose_job_somebody_cancels_is_stopped(
    server: ControlPlane, daemon: Path
) -> None:
    run = queue(server)
    now = waits(server, run, "too few machines are free")
    [job] = now["backend_jobs"]["jobs"].values()
    (daemon / f"{job}.stop").touch()
    until(lambda: server.run(run)["state"] not in ("pending", "queued"), "the end", 60, 0.2)
    ended = server.run(run)
    assert ended["state"] == "stopped"
    assert "CANCELLED" in ended["message"]


def test_a_run_whose_job_the_engine_gives_up_fails_with_its_words(
    server: ControlPlane, daemon: Path
) -> None:
    run = queue(server, cwd="/nobody/has/it")
    for machine in MACHINES:
        (daemon / f"{machine}.cordon").unlink()
    try:
        ended = server.ends(run, 60)
    finally:
        for machine in MACHINES:
            (daemon / f"{machine}.cordon").write_text("somebody else needs it")
    assert ended["state"] == "failed"
    assert "there is no directory /nobody/has/it" in ended["message"]


def test_a_run_waits_for_an_engine_that_is_away(server: ControlPlane) -> None:
    run = queue(server, "ray")
    now = waits(server, run, "Ray")
    assert now["backend_jobs"] == {"launch": 0, "jobs": {"0": None}}
    server.api("POST", f"/runs/{run}/stop", {})
    assert server.run(run)["state"] == "stopped"


# Nodes that somebody starts


def test_nodes_that_somebody_starts_train_as_a_run(server: ControlPlane, folder: Path) -> None:
    work = folder / "adopted"
    work.mkdir()
    (work / "go").touch()  # the script ends with its first epoch
    env = {"PACELINE_TOKEN": server.token}

    def start(slot: str) -> subprocess.Popen[str]:
        place = ["--server", server.url, "--data", str(folder / "nodes"), "--slot", slot]
        shared = ["--run-key", "speech-7", "--nodes", "2", "--name", "adopted"]
        words = [str(SCRIPT), str(work), "nothing", "8"]
        return paceline("node", *place, *shared, *words, env=env)

    both = [start("a"), start("b")]
    said = [process.communicate(timeout=DEADLINE_S) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    [run] = server.api("GET", "/runs?name=adopted")["items"]
    assert (run["state"], run["backend"], run["world"]) == ("finished", "adopted", 2)
    assert server.api("GET", f"/runs/{run['id']}/coverage")["exact"]
    assert {row["state"] for row in server.api("GET", f"/runs/{run['id']}/nodes")} == {"finished"}
    late = start("c")
    out, err = late.communicate(timeout=DEADLINE_S)
    assert late.returncode == 2, (out, err)
    assert "ended" in err or "finished" in err
