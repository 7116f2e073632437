"""The command line inside the tests' process."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable
from functools import cache

import pytest
import typer

from paceline import cli
from paceline.commands import options
from support.node import NOBODY

Main = Callable[..., tuple[int, str, str]]


def in_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """Runs the command line; it returns exit code, standard output and standard error.

    Many times as fast as a process, for commands that start none.
    """
    for name in ("SERVER", "TOKEN", "DATA"):
        monkeypatch.delenv(f"PACELINE_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(options, "DEFAULT_SERVER", NOBODY)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def in_process_often(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    """The same for thousands of commands: they share one parser, and one set of certificates."""
    run = in_process(monkeypatch, capsys)
    run("rejected", "--help")  # another package's command: it adds those of all packages
    monkeypatch.setattr(typer.main, "get_command", cache(typer.main.get_command))
    monkeypatch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
    return run
