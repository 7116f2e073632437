"""A run's progress below what its script prints."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from paceline.node.client import Client
from paceline.node.starting import progress, screen
from paceline.node.starting.progress import Progress, ProgressPoller, duration
from paceline.node.starting.screen import Plain, Terminal
from support.terminal import Screen

NOW = Progress(
    state="running",
    policy="bsp",
    epoch=0,
    epochs=3,
    step=29,
    steps=90,
    step_s=0.25,
    loss=0.5,
    waste=0.41,
    level="held-up",
    verdict="rank 3 computes 2.7 × slower since step 12",
)


class Tty(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def watch() -> ProgressPoller:
    """Knows `NOW`, and asks nobody."""
    made = ProgressPoller(Client("http://127.0.0.1:9"), "r")
    made.now = NOW
    return made


def terminal(watch: ProgressPoller) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120, height=40, _environ={})
    return Terminal(console, watch), file


def seen(file: io.StringIO) -> Screen:
    emulated = Screen()
    emulated.feed(file.getvalue().replace("\n", "\r\n"))  # as a terminal's line discipline does
    return emulated


def test_progress_in_words() -> None:
    assert NOW.line == (
        "epoch 1/3, step 30 of 90, 250 ms per step, loss 0.5, waste 41 %, ETA 15 s, policy bsp. "
        "Slowed down: rank 3 computes 2.7 × slower since step 12"
    )
    assert replace(NOW, state="finished", level="healthy").line.endswith("waste 41 %, policy bsp")
    assert Progress(state="queued").line == "queued …"
    assert replace(NOW, steps=None, epochs=None).figures[:2] == ["epoch 1", "step 30"]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.0123, "12.3 ms"),
        (2.5, "2.5 s"),
        (59.99, "60 s"),
        (61, "1 min"),
        (3600, "1 h 00 min"),
        (7300, "2 h 02 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_steps_in_all_follow_from_the_run() -> None:
    run: dict[str, Any] = {
        "state": "running",
        "policy": "bsp",
        "epoch": 1,
        "epochs": 3,
        "step": 5,
        "steps_per_epoch": 5,
    }
    columns = {"step_s": [0.1, 0.3], "loss": [2.0, None], "waste": [None, None]}
    made = progress.of_run(run, columns)
    assert (made.steps, made.step_s, made.loss, made.waste) == (15, 0.2, 2.0, None)
    assert made.eta_s == pytest.approx(9 * 0.2)
    assert progress.of_run(run | {"steps_per_epoch": None}, columns).steps is None


def test_what_a_script_prints_stands_above_the_progress(watch: ProgressPoller) -> None:
    shown, file = terminal(watch)
    with shown:
        write = shown.writer(Tty())
        write(b"first\nsec")
        lines = seen(file).text.splitlines()
        assert lines[:2] == ["first", "sec"]
        assert "step 30 of 90" in lines[2] and "Slowed down: rank 3" in lines[3]
        write("ond \N{SNOWMAN}".encode()[:-1])
        write("\N{SNOWMAN}".encode()[-1:] + b"\nthird\n")
        lines = seen(file).text.splitlines()
        assert lines[:3] == ["first", "second \N{SNOWMAN}", "third"]
        assert "step 30 of 90" in lines[3]
    assert seen(file).text.rstrip().splitlines() == ["first", "second \N{SNOWMAN}", "third"]
    assert not seen(file).hidden, "the cursor is there again"


def test_a_scripts_own_progress_bar_is_shown_as_it_goes(watch: ProgressPoller) -> None:
    shown, file = terminal(watch)
    with shown:
        write = shown.writer(Tty())
        for percent in range(0, 101, 5):
            write(f"\r{percent:3} %".encode())
        lines = seen(file).text.splitlines()
        assert lines[0] == "100 %" and "step 30 of 90" in lines[1]
        write(b"\ndone\n")
    assert seen(file).text.rstrip().splitlines() == ["100 %", "done"]


def test_lines_of_our_own_stand_above_it_too(watch: ProgressPoller) -> None:
    shown, file = terminal(watch)
    with shown:
        sys.stderr.write("paceline: restarting all ranks\n")
        shown.tick()
    assert seen(file).text.rstrip() == "paceline: restarting all ranks"


def test_a_pipe_gets_the_scripts_bytes_alone(watch: ProgressPoller) -> None:
    shown, file = terminal(watch)
    with shown:
        pipe = io.BytesIO()
        shown.writer(pipe)(b"\xff raw\n")
        assert pipe.getvalue() == b"\xff raw\n"
    assert "raw" not in file.getvalue()


def test_words_of_a_server_are_no_codes(watch: ProgressPoller) -> None:
    watch.now = replace(NOW, verdict="rank 3 \x1b]0;owned\x07")
    shown, file = terminal(watch)
    with shown:
        shown.tick()
    assert "\x1b]0" not in file.getvalue() and "\\x1b]0;owned" in file.getvalue()


def test_plain_lines_say_what_is_new(
    watch: ProgressPoller, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    at = [100.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: at[0])
    plain = Plain(watch)
    watch.now = Progress(state="starting")
    plain.tick()
    assert capsys.readouterr().err == ""
    watch.now = NOW
    plain.tick()
    watch.now = replace(NOW, step=40)
    plain.tick()
    assert capsys.readouterr().err == f"paceline: {NOW.line}\n"
    at[0] += 61
    plain.tick()
    plain.tick()
    assert capsys.readouterr().err.count("step 41 of 90") == 1
    watch.now = replace(NOW, policy="paceline", level="healthy")
    plain.tick()
    assert "policy paceline\n" in capsys.readouterr().err
