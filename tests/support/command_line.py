"""The command line inside the tests' process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from paceline import cli
from support.node import NOBODY

Main = Callable[..., tuple[int, str, str]]


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Runs the command line; it returns exit code, standard output and standard error.

    Many times as fast as a process, for commands that start none.
    """
    for name in ("SERVER", "TOKEN", "DATA"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(cli, "DEFAULT_SERVER", NOBODY)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run
