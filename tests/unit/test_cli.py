"""The command line inside one process: what it refuses, and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline import wire
from paceline.commands.printing import print_table
from paceline.core.epoch_report import EpochReport, Estimate, keep
from paceline.core.errors import InputError
from paceline.node.client import Client
from support.command_line import Main, in_process
from support.node import NOBODY, script


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    return in_process(monkeypatch, capsys)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_version(main: Main) -> None:
    code, out, _ = main("version", "--json")
    assert code == 0
    assert json.loads(out)["protocol"] == wire.PROTOCOL_VERSION
    assert main("version")[1].startswith("paceline ")
    assert main("--version") == (0, f"paceline {json.loads(out)['paceline']}\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "nowhere.py"], 2, "script: there is no file"),
        (["run", "--nproc", "0", "SCRIPT"], 2, "--nproc"),
        (["run", "SCRIPT", "a\0b"], 2, "NUL"),
        (["run", "--bogus", "SCRIPT"], 2, "--bogus"),
        (["run", "--param", "oops", "SCRIPT"], 2, "--param oops: give NAME=VALUE"),
        (["run", "--slowdown", "1,x", "SCRIPT"], 2, "--slowdown 1,x: give factors above 0"),
        (["run", "--slowdown", "1,2", "--nproc", "3", "SCRIPT"], 2, "2 factors for --nproc 3"),
        (["run", "--slowdown", "1", "--seconds-per-step", "-1", "SCRIPT"], 2, "--seconds-per-step"),
        (["run", "--emulate", "nowhere.json", "SCRIPT"], 2, "--emulate nowhere.json: "),
        (["run", "--emulate", "SCRIPT", "SCRIPT"], 2, "--emulate: JSON is malformed"),
        (["run", "--emulate", '{"a_s": [1, "x"], "b_s": [0]}', "SCRIPT"], 2, "at `$.a_s[1]`"),
        (
            ["run", "--emulate", '{"a_s": [1], "b_s": [0]}', "--nproc", "2", "SCRIPT"],
            2,
            "for each of 2 ranks",
        ),
        (["run", "--emulate", "{}", "--slowdown", "1", "SCRIPT"], 2, "give one of them"),
        (
            ["run", "--policy", "bspp", "SCRIPT"],
            2,
            "no policy 'bspp'; did you mean 'bsp'?",
        ),
        (["run", "--param", "mode=fre", "SCRIPT"], 2, "mode"),
        (["run", "--restart-hung", "60", "SCRIPT"], 2, f"no server answers at {NOBODY}"),
        (["run", "--server", NOBODY, "SCRIPT"], 3, f"no server answers at {NOBODY}"),
        (["run", "--data", "SCRIPT", "SCRIPT"], 3, "cannot be written"),
        (["agent", "--data", "/proc/paceline", "--bus", "redis://h"], 3, "cannot be written"),
        (["agent", "--bus", "http://h"], 2, "bus http://h: "),
        (["runs", "--server", NOBODY], 3, "no server answers"),
        (["runs", "--server", "http://h:bad"], 2, "--server http://h:bad: "),
        (["report"], 2, "name a run, or give --local"),
        (["report", "--local"], 2, "no run without a server is kept"),
        (["report", "7", "--data", "SCRIPT"], 2, "--data: leave it out without --local"),
        (["report", "--local", "-o", "x.html"], 2, "--output: leave it out with --local"),
    ],
)
def test_bad_input(
    arguments: list[str],
    code: int,
    words: str,
    data: Path,
    tmp_path: Path,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = script(tmp_path, "raise SystemExit('it must not run')")
    arguments = [path if a == "SCRIPT" else a for a in arguments]
    monkeypatch.setenv("PACELINE_DATA", str(data))
    got, out, err = main(*arguments)
    assert got == code, err
    assert words in err
    assert out == ""
    assert "Traceback" not in err
    if "paceline: " in err:
        assert len(err.strip().splitlines()) == 1


def test_the_epochs_of_a_run_without_a_server(main: Main, data: Path) -> None:
    balanced = EpochReport(
        *(0, 0, 9, True, "paceline", 62.7, 0.02, 0.05, [0.75, 0.25], [1_235_000.0, 91.89], 1.0),
        Estimate(92.8, 0.31),
    )
    young = msgspec.structs.replace(balanced, equal=None)
    other = msgspec.structs.replace(balanced, policy="lbb", epoch_s=46.4)
    local = data / "local"
    keep(local / "20261201-120000-train-7.jsonl", young)
    keep(local / "20261201-120000-train-7.jsonl", balanced)
    keep(local / "20261130-120000-other-6.jsonl", other)
    code, out, _ = main("report", "--local", "--data", str(data))
    assert code == 0
    assert out.startswith("run 20261201-120000-train-7\n")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "0 paceline 9 62.7 s 2 % 0.05" in lines
    assert "0 paceline 9 62.7 s 2 % 0.05 92.8 s, 31 % 1.48" in lines
    assert "0 75.0 % 1,235,000" in lines
    assert "1 25.0 % 91.89" in lines
    assert out.endswith("other runs: 20261130-120000-other-6\n")
    _, out, _ = main("report", "20261130", "--local", "--data", str(data))
    assert "0 lbb 9 46.4 s 2 % 0.05 92.8 s, 31 % 2.00" in " ".join(out.split())
    code, out, _ = main("report", "--local", "--json", "--data", str(data))
    written = json.loads(out)
    assert written["run"] == "20261201-120000-train-7"
    assert msgspec.convert(written["epochs"], list[EpochReport]) == [young, balanced]


@pytest.mark.parametrize(
    "command", [["stop", "--yes"], ["switch", "bsp", "--yes"], ["auto", "off", "--yes"], ["whatif"]]
)
def test_a_run_is_known_by_a_beginning_that_no_other_has(
    command: list[str], main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def call(client: Client, method: str, path: str, *_: object, **options: Any) -> Any:
        asked.append(path)
        if path == "/runs":  # in two pages
            first = options["params"].get("cursor") is None
            ids = ["ab12cd", "ab34ef"] if first else ["c0ffee"]
            return {"items": [{"id": i} for i in ids], "next_cursor": "2" if first else None}
        if path in ("/runs/ab12cd", "/runs/c0ffee"):
            return {"id": path.rpartition("/")[2], "revision": 3}
        if path == "/policies":  # before a switch
            return []
        if path.count("/") == 2:
            raise InputError("no such run")
        raise InputError("far enough")

    monkeypatch.setattr(Client, "call", call)
    for given, words, last in [
        ("ab12cd", "far enough", "/runs/ab12cd/"),
        ("ab1", "far enough", "/runs/ab12cd/"),
        ("c", "far enough", "/runs/c0ffee/"),
        ("ab", "RUN ab: 2 runs begin with it: ab12cd, ab34ef", "/runs"),
        ("x", "RUN x: no run's id begins with it", "/runs"),
        ("../../x", "RUN ../../x: ", ""),
        ("..", "RUN ..: ", ""),
        ("ab12cd/stop?x=", "RUN ab12cd/stop?x=: ", ""),
        ("", "RUN : ", ""),
    ]:
        asked.clear()
        code, _, err = main(command[0], given, *command[1:])
        assert code == 2
        assert words in err
        assert asked[-1].startswith(last) if last else not asked


def test_a_terminal_does_not_obey_what_others_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("id", "message"), [{"id": "r", "message": "\x1b[2Jfailed\nmore"}])
    shown = capsys.readouterr().out
    assert "\\x1b[2Jfailed" in shown
    assert "\x1b" not in shown
