"""Of the launcher and its supervisor what needs no process: checks, and the words of a failure."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import InputError
from paceline.node import rundir
from paceline.node.elastic.ranks import last_words
from paceline.node.rundir import Record
from paceline.node.supervisor import Supervisor, check
from paceline.wire import Launch
from support.node import script


@pytest.mark.parametrize(
    ("log", "shown"),
    [
        (b"", ""),
        (b"\n\n", ""),
        (b"one\ntwo\n", "one\ntwo"),
        (b"[rank1]: one\n[rank1]: two", "one\ntwo"),
        (b" 10%\r 50%\r100%\nover\n", "100%\nover"),
        (b"a" * 5000, "a" * 2000),
        (b"first\n" + b"a" * 1999 + b"\n", "a" * 1999),
        (b"x\0y", "xy"),
    ],
)
def test_the_end_of_a_log(log: bytes, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(log)
    assert rundir.last_lines(path) == shown
    assert rundir.last_lines(tmp_path / "missing") == ""


@pytest.mark.parametrize("run", ["../../x", "/x", "..", ".", "", "a/b", "a\0b", "a\n"])
def test_an_id_that_could_lead_elsewhere_is_refused(run: str, tmp_path: Path) -> None:
    launch = Launch(script(tmp_path, ""), [], 1, {})
    data = tmp_path / "data"
    with pytest.raises(InputError, match="an id has letters"):
        Supervisor(launch, data, Record(run, "here", "the agent", ""), None)
    assert not data.exists() and not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("script: there is no file", {"script": "nowhere.py"}),
        ("cwd: there is no directory", {"cwd": "/nowhere"}),
        ("nproc: 0", {"nproc": 0}),
        ("max_restarts: -1", {"max_restarts": -1}),
        ("env: 'A=B'", {"env": {"A=B": "x"}}),
        ("NUL", {"args": ["a\0b"]}),
        ("nodes: PACELINE_DRIVER", {"env": {"PACELINE_DRIVER": "1"}, "nodes_max": 2}),
    ],
)
def test_what_cannot_be_launched_is_refused(
    field: str, change: dict[str, object], tmp_path: Path
) -> None:
    good = {"script": script(tmp_path, ""), "args": [], "nproc": 1, "env": {}}
    check(Launch(**good))
    with pytest.raises(InputError, match=field):
        check(Launch(**{**good, **change}))


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        ("", ""),
        ("warning\n\nlast line\n\n", "last line"),
        (
            "Traceback (most recent call last):\n  File 'x'\nKeyError: 1\n\n"
            "During handling of the above exception, another exception occurred:\n\n"
            "Traceback (most recent call last):\n  File 'y'\n    f()\n    ^^^\n"
            "pkg.mod.OddError: first\n  second: line\nlater noise\n",
            "pkg.mod.OddError: first",
        ),
        (
            "Traceback (most recent call last):\n  File 'x'\nKeyboardInterrupt\n",
            "KeyboardInterrupt",
        ),
        ('  File "x.py", line 1\n    a b\n      ^\nSyntaxError: invalid\n', "SyntaxError: invalid"),
    ],
)
def test_last_words(stderr: str, words: str) -> None:
    assert last_words(stderr) == words
