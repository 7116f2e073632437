"""Two nodes that somebody starts by themselves, with a real server and real ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline_backend.testing.control_plane import ControlPlane
from support.node import paceline, script
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).parents[2] / "support" / "several_script.py"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path) as started:
        yield started


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


PRINTS = f"""
    import os, runpy
    print("rank", os.environ["RANK"], "is here")
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def node(server: ControlPlane, slot: str) -> subprocess.Popen[str]:
    """A node of the run, as a launcher of one's own starts it on each machine."""
    train = script(server.folder, PRINTS)
    env = {
        "PACELINE_SERVER": server.url,
        "PACELINE_TOKEN": server.token,
        "PACELINE_RUN_KEY": "mine",
        "PACELINE_DATA": str(server.folder / "data"),
    }
    options = ("--slot", slot, "--nodes", "2", "--policy", "bsp", "--name", "mine")
    words = (train, str(server.folder), "1000", "2", "0.05")
    return paceline("node", *options, *words, env=env)


def test_two_nodes_train_one_run(
    server: ControlPlane, started: list[subprocess.Popen[str]]
) -> None:
    started += [node(server, "left"), node(server, "right")]

    def run() -> dict[str, Any] | None:
        for process in started:
            assert process.poll() is None, process.communicate()
        known = server.api("GET", "/runs")["items"]
        assert len(known) < 2
        return dict(known[0]) if known else None

    adopted = until(run, "the run")
    server.reaches(adopted["id"], 4, 2, TRAINING_S)
    rows = server.api("GET", f"/runs/{adopted['id']}/nodes")
    # The name of a node that only this run has ends with the run.
    names = sorted(row["node"].rpartition("-")[2].partition(".")[0] for row in rows)
    assert names == ["left", "right"]
    server.api("POST", f"/runs/{adopted['id']}/policy", {"policy": "chronica"})
    logs = server.api("GET", f"/runs/{adopted['id']}/logs")["logs"]
    assert {log["rank"] for log in logs if isinstance(log["rank"], int)} == {0, 1}
    until(lambda: switched(server, adopted["id"]), "the other policy", TRAINING_S, 0.1)
    (server.folder / "enough").touch()
    assert server.ends(adopted["id"])["state"] == "finished"
    outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert sorted(outputs) == ["", "rank 0 is here\n"]
    covered = server.api("GET", f"/runs/{adopted['id']}/coverage")
    assert all(epoch["exact"] for epoch in covered["epochs"]), covered
    late = node(server, "late")
    _, said = late.communicate(timeout=DEADLINE_S)
    assert late.returncode == 2
    assert f"its run {adopted['id']} is finished: choose another key" in said


def switched(server: ControlPlane, run: str) -> bool:
    """Whether the newest policy plans."""
    newest = server.api("GET", f"/runs/{run}/switches")[-1]
    return newest["policy"] == "chronica" and newest["effective_step"] is not None
