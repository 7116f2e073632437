"""Training outlives the control plane and the bus; what happened meanwhile arrives afterwards."""

from __future__ import annotations

import os
import signal
import statistics
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from paceline_backend.insight.replay import replay
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support import slowing_script
from support.e2e import (
    PAUSE_S,
    all_steps,
    controllers_segments,
    start_script,
    start_training,
    stop,
    wait_for_step,
)
from support.node import wait_gone
from support.waiting import DEADLINE_S, TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]


def rank_pids(stack: Stack) -> set[int]:
    """The training processes: children of the agent that run the script with a RANK."""
    assert stack.agent is not None
    pids = set()
    for child in psutil.Process(stack.agent.pid).children(recursive=True):
        try:
            if "RANK" in child.environ() and "train.py" in " ".join(child.cmdline()):
                pids.add(child.pid)
        except psutil.Error:
            continue
    return pids


def bus_process(stack: Stack) -> psutil.Process:
    assert stack.server is not None
    for child in psutil.Process(stack.server.pid).children(recursive=True):
        if "valkey" in child.name() or "redis" in child.name():
            return child
    raise AssertionError("the server has no bus process")


def spooled(stack: Stack) -> list[Path]:
    return [*stack.data.rglob("*.spool"), *stack.data.rglob("*.part")]


def plans_locally(stack: Stack) -> bool:
    """Whether the leader has adopted a plan that rank 0 made."""
    adopted = msgspec.msgpack.encode("local")
    return any(adopted in path.read_bytes() for path in spooled(stack))


def wait_for_plan(stack: Stack, run: str, since: float) -> None:
    """Until ranks have adopted a controller's plan after that time, in seconds since the epoch."""

    def planned() -> bool:
        return any(s["adopted_at"] > since for s in controllers_segments(stack, run))

    until(planned, "a controller's segment", TRAINING_S, PAUSE_S)


def assert_whole(stack: Stack, run: str) -> None:
    steps = all_steps(stack, run)["step"]
    assert steps == list(range(len(steps))), "no step row is missing"
    workers = stack.api("GET", f"/runs/{run}/workers")
    assert [w["missing"] for w in workers] == [0] * 4
    assert stack.api("GET", f"/runs/{run}/coverage")["exact"] is True


def test_control_plane_killed_and_started_again(stack: Stack) -> None:
    run = start_training(stack, policy="chronica")
    wait_for_step(stack, run, 10)
    ranks = rank_pids(stack)
    assert len(ranks) >= 4

    assert stack.server is not None
    os.kill(stack.server.pid, signal.SIGKILL)
    stack.server.wait()
    until(lambda: plans_locally(stack), "rank 0's plans in the spool", DEADLINE_S, PAUSE_S)
    stack.start_server()
    wait_for_plan(stack, run, time.time())
    assert rank_pids(stack) == ranks, "the same ranks train on"
    stop(stack, run)

    assert_whole(stack, run)
    segments = stack.api("GET", f"/runs/{run}/segments")
    sources = [segment["source"] for segment in segments]
    first = sources.index("local")
    assert "controller" in sources[:first]
    assert "controller" in sources[first:], "a controller took over again"
    assert {s["policy"] for s in segments if s["source"] == "local"} == {"chronica"}
    with Store.open(f"sqlite:///{stack.data / 'paceline.db'}") as store:
        again = replay(store, run)
    assert again.identical == again.segments, again.first_difference


def test_a_rank_that_slows_down_while_the_server_is_gone_is_levelled(
    stack: Stack, tmp_path: Path
) -> None:
    """Within ten steps of the slowdown, which rank 0's plans must notice."""
    run = start_script(stack, slowing_script, tmp_path, 2, "paceline")
    wait_for_step(stack, run, 20)
    assert stack.server is not None
    os.kill(stack.server.pid, signal.SIGKILL)
    stack.server.wait()
    until(lambda: plans_locally(stack), "rank 0's plans in the spool", DEADLINE_S, PAUSE_S)
    (tmp_path / "slow").touch()
    since = int(until(lambda: _text(tmp_path / "slow-since"), "the slowdown", DEADLINE_S))
    until(lambda: int(_text(tmp_path / "step") or 0) > since + 30, "30 slow steps", DEADLINE_S)
    stack.start_server()
    wait_for_plan(stack, run, time.time())
    stop(stack, run)

    assert stack.api("GET", f"/runs/{run}/coverage")["exact"] is True
    se = all_steps(stack, run)["se"]
    assert statistics.fmean(se[since : since + 2]) > 0.2, "the rank is slow"
    assert statistics.fmean(se[since + 10 : since + 30]) < 0.1
    with Store.open(f"sqlite:///{stack.data / 'paceline.db'}") as store:
        again = replay(store, run)
    assert again.identical == again.segments, again.first_difference


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_bus_killed(stack: Stack) -> None:
    run = start_training(stack, policy="chronica")
    wait_for_step(stack, run, 10)
    ranks = rank_pids(stack)
    victim = bus_process(stack)
    victim.send_signal(signal.SIGKILL)
    wait_gone([victim])
    until(lambda: bus_process_or_none(stack), "the bus to be started again", DEADLINE_S, PAUSE_S)
    wait_for_plan(stack, run, time.time())
    assert rank_pids(stack) == ranks
    stop(stack, run)
    assert_whole(stack, run)


def bus_process_or_none(stack: Stack) -> psutil.Process | None:
    try:
        process = bus_process(stack)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except (AssertionError, psutil.Error):
        return None


def test_stop_leaves_no_process(stack: Stack) -> None:
    run = start_training(stack)
    wait_for_step(stack, run, 3)
    assert stack.server is not None
    assert stack.agent is not None
    family = [
        process
        for parent in (stack.server.pid, stack.agent.pid)
        for process in psutil.Process(parent).children(recursive=True)
    ]
    assert len(family) >= 4 + 3
    stack.stop()
    wait_gone(family)
