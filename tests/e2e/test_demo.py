"""`paceline demo` as a new user runs it."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from support.node import wait_gone
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = pytest.mark.ranks


def test_report(tmp_path: Path) -> None:
    fast = ["--slowdown", "0.25,0.25,0.375,0.75"]  # of the demo's own times per point
    command = ["demo", "--report", "--json", *fast, "--epochs", "8", "--switch-at", "24"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *command, "--data", str(tmp_path)],
        capture_output=True,
        timeout=TRAINING_S,
    )
    assert done.returncode == 0, done.stderr.decode()
    figures = json.loads(done.stdout)  # and nothing else on standard output
    assert set(figures["presets"]) == {"bsp", "chronica"}
    for preset in figures["presets"].values():
        assert set(preset) >= {
            "steps",
            "step_time_s",
            "se",
            "step_dif",
            "waste",
            "ett_mape",
            "time_over_fluid",
            "speedup",
            "speedup_limit",
        }
        assert preset["steps"] > 0
    assert figures["coverage"]["exact"] is True
    assert len(figures["coverage"]["epochs"]) == 8
    assert 0.1 < figures["accuracy"] <= 1
    assert figures["emulated"]["slowdowns"] == [0.25, 0.25, 0.375, 0.75]


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_signal_leaves_no_process(tmp_path: Path, number: int) -> None:
    with (tmp_path / "log").open("wb") as log:
        where = ["--port", "0", "--data", str(tmp_path / "data")]
        demo = subprocess.Popen(
            [sys.executable, "-m", "paceline", "demo", *where],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    family = psutil.Process(demo.pid)
    try:
        until(lambda: len(_ranks(family)) >= 4, "ranks", DEADLINE_S, pause_s=0.2)
        children = family.children(recursive=True)
        demo.send_signal(number)
        assert demo.wait(timeout=DEADLINE_S) == 128 + number
    finally:
        demo.kill()
        demo.wait()
    wait_gone(children)
    assert "http://127.0.0.1:" in (tmp_path / "log").read_text()


def test_port_of_another_server(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "paceline", "demo", "--port", port, "--data", str(tmp_path)],
            capture_output=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 3
    assert f"port {port}" in done.stderr.decode()
    assert "choose another with --port" in done.stderr.decode()


@pytest.mark.long
def test_says_so_when_its_server_ends(tmp_path: Path) -> None:
    where = ["--port", "0", "--data", str(tmp_path)]
    demo = subprocess.Popen(
        [sys.executable, "-m", "paceline", "demo", *where],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        family = psutil.Process(demo.pid)
        until(lambda: len(_ranks(family)) >= 4, "ranks", DEADLINE_S, pause_s=0.2)
        server = next(c for c in family.children() if "server" in c.cmdline())
        server.kill()
        _, said = demo.communicate(timeout=DEADLINE_S)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 3
    assert "paceline server ended with code -9" in said.decode()


def _ranks(family: psutil.Process) -> list[psutil.Process]:
    processes = []
    for child in family.children(recursive=True):
        try:
            if "train.py" in " ".join(child.cmdline()) and "RANK" in child.environ():
                processes.append(child)
        except psutil.Error:
            continue  # it ended meanwhile
    return processes
