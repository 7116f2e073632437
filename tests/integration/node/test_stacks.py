"""Stacks of real processes; and what a node makes of announcements that it must not believe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from paceline.node import rundir
from paceline.node.health import ending, stacks
from paceline.node.health.stacks import ANNOUNCED, WRITTEN, Announcement
from paceline.node.rundir import EndedRanks, LauncherStatus, Record
from paceline.wire import EndRanks, RunState, State
from paceline.wire.asking import Dump, Dumps, NotThere, StackTrace
from support.waiting import until

RUN = "r"
Start = Callable[..., subprocess.Popen[bytes]]

REGISTERS = """
import os, threading
from paceline.train import stacks

def wait():
    print("waits", flush=True)
    threading.Event().wait()

print(stacks.register(os.environ), flush=True)
wait()
"""
CATCHES = """
import faulthandler, signal, sys
number = signal.SIGRTMIN + 8
signal.signal(number, lambda *_: print("mine", flush=True))
""" + REGISTERS.replace("    threading.Event().wait()", "    while True: signal.pause()")
PLAIN = "import time\nprint('waits', flush=True)\ntime.sleep(3600)"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """The directory of a run that trains, in its attempt 2."""
    folder = tmp_path / "runs" / RUN
    folder.mkdir(parents=True)
    rundir.write(folder / "launcher.json", LauncherStatus(2))
    report(folder, State.RUNNING)
    return folder


def report(directory: Path, state: State) -> None:
    states = [RunState(state, 1.0, "here", 2)]
    rundir.write(directory / "run.json", Record(RUN, "here", "the agent", "id", states))


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    processes: list[subprocess.Popen[bytes]] = []

    def started(text: str, rank: int = 0, **variables: str) -> subprocess.Popen[bytes]:
        log = rundir.rank_log(directory, 2, rank, "stdout")
        log.parent.mkdir(parents=True)
        names = {"PACELINE_RUN": RUN, "RANK": str(rank), "PACELINE_ATTEMPT": "2"}
        errors = {"TORCHELASTIC_ERROR_FILE": str(log.with_name("error.json"))}
        with log.open("wb") as out, log.with_name("stderr.log").open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-c", text],
                stdout=out,
                stderr=err,
                env={**os.environ, **names, **errors, **variables},
            )
        processes.append(process)
        until(lambda: "waits" in log.read_text(), f"rank {rank} to wait")
        return process

    yield started
    for process in processes:
        process.kill()
        process.wait()


def dumped(directory: Path) -> list[Dump]:
    answer = stacks.dump(directory, RUN)
    assert isinstance(answer, Dumps), answer
    assert answer.attempt == 2
    return answer.ranks


def written(directory: Path, dump: Dump) -> StackTrace:
    """What a rank writes when it was asked."""
    assert not dump.why

    def stack() -> StackTrace | None:
        [read] = stacks.read(directory, 2, [(dump.rank, dump.offset)]).stacks
        return read if "<module>" in read.text else None

    return until(stack, f"the stacks of rank {dump.rank}")


def announce(directory: Path, rank: int, pid: int, number: int) -> Path:
    """What a rank would say; its folder."""
    folder = rundir.rank_log(directory, 2, rank, "stderr").parent
    folder.mkdir(parents=True, exist_ok=True)
    rundir.write(folder / ANNOUNCED, Announcement(pid, number, 1, []))
    (folder / WRITTEN).touch()
    return folder


def test_a_rank_writes_where_it_waits(directory: Path, start: Start) -> None:
    process = start(REGISTERS)
    for _ in range(3):
        [dump] = dumped(directory)
        stack = written(directory, dump)
        assert stack.why == ""
        assert "in wait" in stack.text
    assert process.poll() is None
    mode = (rundir.rank_log(directory, 2, 0, "stderr").parent / WRITTEN).stat().st_mode
    assert mode & 0o777 == 0o600


def test_the_users_handler_stays(directory: Path, start: Start) -> None:
    process = start(CATCHES)
    log = rundir.rank_log(directory, 2, 0, "stdout")
    number = int(log.read_text().split()[0])
    assert number == signal.SIGRTMIN + 9
    written(directory, dumped(directory)[0])
    assert "mine" not in log.read_text()
    process.send_signal(signal.SIGRTMIN + 8)
    until(lambda: "mine" in log.read_text(), "the script's own handler")


def test_only_launched_ranks_take_a_signal(directory: Path, start: Start) -> None:
    start(REGISTERS, PACELINE_RUN="")
    assert rundir.rank_log(directory, 2, 0, "stdout").read_text().startswith("None\n")
    [dump] = dumped(directory)
    assert "has not created a paceline.Session" in dump.why


def test_a_process_that_catches_nothing_gets_no_signal(directory: Path, start: Start) -> None:
    process = start(PLAIN)
    for number in (signal.SIGRTMIN + 8, signal.SIGKILL, signal.SIGTERM, 0, 10**6, -1):
        announce(directory, 0, process.pid, number)
        assert dumped(directory)[0].why == (
            "its process does not catch the signal that it announced"
        )
    assert process.poll() is None


def test_another_process_is_not_asked(directory: Path, start: Start) -> None:
    """Of another rank, of nobody, of this test."""
    process = start(REGISTERS)
    number = int(rundir.rank_log(directory, 2, 0, "stdout").read_text().split()[0])
    for pid in (process.pid, os.getpid(), 2**22 + 1, 0, -1):
        announce(directory, 1, pid, number)
        assert dumped(directory)[1].why == "its process has ended"
    assert process.poll() is None


def test_a_process_that_ended_says_so(directory: Path, start: Start) -> None:
    process = start(REGISTERS)
    process.kill()
    process.wait()
    assert dumped(directory)[0].why == "its process has ended"


def test_files_that_are_something_else(directory: Path, start: Start, tmp_path: Path) -> None:
    process = start(PLAIN)
    folder = announce(directory, 0, process.pid, signal.SIGRTMIN + 8)
    (folder / ANNOUNCED).write_text("{")
    assert "cannot be read" in dumped(directory)[0].why
    (folder / ANNOUNCED).unlink()
    (tmp_path / "secret").write_bytes(msgspec.json.encode(Announcement(process.pid, 42, 1, [])))
    (folder / ANNOUNCED).symlink_to(tmp_path / "secret")
    assert "has not created a paceline.Session" in dumped(directory)[0].why
    (folder / WRITTEN).unlink()
    (folder / WRITTEN).symlink_to(tmp_path / "secret")
    [stack] = stacks.read(directory, 2, [(0, 0)]).stacks
    assert (stack.text, "cannot be read" in stack.why) == ("", True)


def test_a_run_that_ended_has_none(directory: Path) -> None:
    assert isinstance(stacks.dump(directory, RUN), NotThere)  # no rank has begun
    report(directory, State.FAILED)
    assert stacks.dump(directory, RUN) == NotThere("the run has ended on this node")


def test_a_long_text_keeps_its_end_and_a_long_file_begins_anew(
    directory: Path, start: Start
) -> None:
    start(REGISTERS)
    file = rundir.rank_log(directory, 2, 0, "stderr").parent / WRITTEN
    file.write_text("x" * 600_000)
    stack = written(directory, dumped(directory)[0])
    assert file.stat().st_size < 600_000
    file.write_text("a line\n" * 20_000 + stack.text)
    [cut] = stacks.read(directory, 2, [(0, 0)]).stacks
    assert len(cut.text) <= 65_537
    assert cut.text.endswith(stack.text)


TEXT = """Thread 0x00000000000000a1 (most recent call first):
  File "/home/me/helper.py", line 3 in poll
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00000000000000ff (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/venv/lib/python3.11/site-packages/torch/_tensor.py", line 623 in backward
  File "<frozen runpy>", line 88 in _run_code
  File "/home/me/train.py", line 14 in step
  File "/home/me/train.py", line 40 in <module>
"""


@pytest.mark.parametrize(
    ("text", "frame"),
    [
        (TEXT, "train.py:14 in step"),
        (TEXT.partition("Current")[0], "helper.py:3 in poll"),
        (TEXT.replace("/home/me/", "/usr/lib/python3.11/"), ""),
        ("", ""),
    ],
    ids=["main thread first", "another thread", "libraries only", "nothing"],
)
def test_the_innermost_frame_of_the_users_code(text: str, frame: str) -> None:
    announced = Announcement(1, 42, 0xFF, ["/usr/lib/python3.11/"])
    assert stacks.frame_of(text, announced) == frame


def end(directory: Path, attempt: int, *ranks: int) -> bool:
    order = EndRanks(attempt, list(ranks), "No step has ended for 61 s.")
    under_way = ending.Ending.begin(directory, RUN, os.getpid(), order)
    if under_way is None:
        return False
    until(under_way.done, "the ranks to be ended")
    return True


def test_ranks_are_ended_once_with_their_stacks_in_their_logs(
    directory: Path, start: Start
) -> None:
    held, other = start(REGISTERS, 0), start(REGISTERS, 1)
    assert not end(directory, 1, 0)  # that attempt is over
    assert held.poll() is None
    assert end(directory, 2, 0, 7)  # rank 7 is on another node
    assert until(lambda: held.poll(), "rank 0 to end") == -signal.SIGKILL
    assert other.poll() is None
    log = rundir.rank_log(directory, 2, 0, "stderr").read_text()
    assert "\npaceline ends this rank because the run hangs: No step has ended for 61 s.\n" in log
    assert "in wait" in log
    assert "paceline" not in rundir.rank_log(directory, 2, 1, "stderr").read_text()
    ended = rundir.read(directory / "ended.json", EndedRanks)
    assert ended == EndedRanks(2, [0, 7], "No step has ended for 61 s.")
    assert not end(directory, 2, 1)  # it was obeyed for this attempt
    assert other.poll() is None


def test_a_suspended_rank_is_ended_without_stacks(directory: Path, start: Start) -> None:
    process = start(REGISTERS)
    process.send_signal(signal.SIGSTOP)
    until(lambda: "suspended" in dumped(directory)[0].why, "the rank to be suspended")
    assert end(directory, 2, 0)
    assert until(lambda: process.poll(), "rank 0 to end") == -signal.SIGKILL
    log = rundir.rank_log(directory, 2, 0, "stderr").read_text()
    assert "no stacks: its process is suspended (SIGSTOP)" in log
