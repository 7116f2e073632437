"""The keeper of a node on Ray: real processes, without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from paceline_backend.backends import ray_driver
from support.waiting import until

# Says what it got, then waits; it leaves a file where it was asked to end.
NODE = """
trap 'touch left; exit 3' TERM
echo "$1 $2 $PACELINE_TOKEN" >got.part; mv got.part got
for _ in $(seq 3000); do sleep 0.1; done
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a keeper as an actor does, in a job's directory."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        script: str = NODE, cwd: Path = tmp_path, grace_s: float = 30.0, parent: int = 0
    ) -> subprocess.Popen[bytes]:
        text = Path(ray_driver.__file__).read_text()
        assert "NODE_LEAVE_S = 30.0" in text
        program = tmp_path / ray_driver.NAME
        program.write_text(text.replace("NODE_LEAVE_S = 30.0", f"NODE_LEAVE_S = {grace_s}"))
        settings = {"cwd": str(cwd), "env": {"PACELINE_TOKEN": "t"}, "slot": "r.0.0"}
        (tmp_path / ray_driver.SETTINGS).write_text(json.dumps({**settings, "script": script}))
        words = [sys.executable, str(program), "keep", "1", str(parent or os.getpid()), "h"]
        started.append(subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


def test_a_node_is_asked_to_leave(
    tmp_path: Path, keeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = keeper()
    until((tmp_path / "got").exists, "the node")
    assert (tmp_path / "got").read_text() == "r.0.0.1 h t\n"
    process.terminate()
    assert process.wait(120) == 3
    assert (tmp_path / "left").exists()


def test_a_node_that_does_not_leave_is_killed(
    tmp_path: Path, keeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = keeper(
        "trap '' TERM; touch got; for _ in $(seq 3000); do sleep 0.1; done", grace_s=0.1
    )
    until((tmp_path / "got").exists, "the node")
    process.terminate()
    assert process.wait(120) == 128 + signal.SIGKILL


def test_a_node_whose_keeper_is_killed_leaves(
    tmp_path: Path, keeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = keeper()
    until((tmp_path / "got").exists, "the node")
    process.kill()
    until((tmp_path / "left").exists, "the node's end")


def test_a_node_whose_worker_is_killed_leaves(
    tmp_path: Path, keeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    keeper(parent=1).wait(120)  # writes the job's directory
    code = (
        "import os, subprocess, sys; "
        "process = subprocess.Popen([*sys.argv[1:], str(os.getpid()), 'h']); process.wait()"
    )
    words = [sys.executable, str(tmp_path / ray_driver.NAME), "keep", "1"]
    with subprocess.Popen([sys.executable, "-c", code, *words]) as worker:
        until((tmp_path / "got").exists, "the node")
        worker.kill()
    until((tmp_path / "left").exists, "the node's end")


def test_no_node_is_started_for_a_worker_that_is_gone(
    tmp_path: Path, keeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    assert keeper(parent=1).wait(120) == 1
    assert not (tmp_path / "got").exists()


def test_a_directory_that_the_node_lacks_is_named(
    tmp_path: Path, keeper: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = keeper(cwd=tmp_path / "nowhere")
    assert process.wait(120) == 1
    assert process.stderr is not None
    assert b"nowhere" in process.stderr.read()
