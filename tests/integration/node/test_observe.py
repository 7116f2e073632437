"""Which signals reach a command that `paceline observe` has started, and what ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from paceline.node.starting import observing
from paceline.node.starting.observing import Observation
from paceline.wire import Kill, State
from support.waiting import until

FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
ANSWERS = f"""
import os, pathlib, signal, sys
numbers = {[int(each) for each in FORWARDED]}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
for number in numbers:
    os.kill(os.getppid(), number)
    assert signal.sigwait(numbers) == number
pathlib.Path(sys.argv[1]).touch()
signal.sigwait(numbers)
sys.exit(7)
"""
WAITS = """
import os, pathlib, signal, sys
if sys.argv[2] == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
made = pathlib.Path(sys.argv[1] + ".new")
made.write_text(str(os.getpid()))
made.rename(sys.argv[1])
signal.pause()
"""
AWAY = """
import pathlib, sys
from paceline.node.client import Client
from paceline.node.starting import observing
command = [sys.executable, "-c", "import os; print(os.getpid())"]
observing.observe(
    command, Client("http://127.0.0.1:1"), name=None, node="here",
    data=pathlib.Path(sys.argv[1]), required=False,
)
"""


@pytest.fixture(autouse=True)
def _handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(observing, "_in_foreground", lambda: False)
    monkeypatch.setattr(observing, "_KILL_PROCESSES_AFTER_S", 0.0)
    before = {number: signal.getsignal(number) for number in FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def observation(
    command: list[str],
    directory: Path,
    *,
    orders: Callable[[], list[Any]] = list,
    pump: Callable[[], None] = lambda: None,
) -> tuple[Observation, list[State]]:
    states: list[State] = []
    delivery: Any = SimpleNamespace(
        report=lambda state, *_: states.append(state),
        pump=pump,
        record=SimpleNamespace(run="r"),
        directory=directory,
    )
    link: Any = SimpleNamespace(session=SimpleNamespace(bus="redis://", key=None), up=False)
    made = Observation(command, delivery, link, "here")
    made._commands = SimpleNamespace(read=lambda _block_s: orders())  # type: ignore[assignment]
    return made, states


def test_signals_reach_the_command_which_takes_its_time(tmp_path: Path) -> None:
    answered, ticks = tmp_path / "answered", iter(range(3))

    def pump() -> None:
        if answered.exists() and next(ticks, None) is None:
            os.kill(os.getpid(), signal.SIGUSR1)

    command = [sys.executable, "-c", ANSWERS, str(answered)]
    observed, states = observation(command, tmp_path, pump=pump)
    assert observed.run() == 7
    assert states == [State.STARTING, State.RUNNING, State.STOPPED]


def test_a_signal_that_comes_first_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = observing._started

    def interrupted(*given: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return started(*given)

    monkeypatch.setattr(observing, "_started", interrupted)
    observed, states = observation(["sleep", "60"], tmp_path)
    assert observed.run() == 128 + signal.SIGTERM
    assert states[-1] is State.STOPPED


@pytest.mark.parametrize("kind", ["obeys", "ignores"])
def test_stop_ends_what_a_shell_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "obeys":
        monkeypatch.setattr(observing, "_KILL_PROCESSES_AFTER_S", 600.0)
    pid = tmp_path / "pid"
    words = ["bash", "-c", '"$@" & wait', "bash", sys.executable, "-c", WAITS, str(pid), kind]
    order = ("r", Kill("stopped by a user", 0))
    observed, states = observation(words, tmp_path, orders=lambda: [order] * pid.exists())
    observed.run()
    assert states[-1] is State.STOPPED
    started = int(pid.read_text())
    try:
        until(lambda: not running(started), "its end", timeout_s=10)
    finally:
        if running(started):
            os.kill(started, signal.SIGKILL)


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_without_a_control_plane_the_command_takes_our_place(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", AWAY, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, err = process.communicate(timeout=120)
    assert (out.strip(), process.returncode) == (str(process.pid), 0), err
    assert "the script runs unobserved" in err
