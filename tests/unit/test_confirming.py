"""Every command that changes a run asks first, or needs --yes where it cannot ask."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import entry_points
from typing import Any

import pytest
import typer

from paceline import cli
from paceline.node.client import Client
from support.command_line import Main, in_process

# The arguments after RUN with which a command changes the run; a command that is missing here
# must not send anything but GET.
CHANGES: dict[str, list[list[str]]] = {
    "switch": [["rna", "--why", "to try it"]],
    "stop": [["--force"]],
    "resume": [[]],
    "auto": [["switch", "--relaxed"]],
    "target": [["accuracy>=0.9"], ["--remove"]],
    "runs tag": [["nightly"]],
    "runs untag": [["nightly"]],
    "runs note": [["with the new data"]],
}
CASES = [(name, rest) for name, all_rest in CHANGES.items() for rest in all_rest]
READS: dict[str, list[str]] = {"runs export": ["-o", "rows.csv"]}


class Answers:
    """A server's answers, and the requests that were not only reads."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, str]] = []

    def call(self, _: Client, method: str, path: str, *rest: Any, **options: Any) -> Any:
        if method != "GET":
            self.changes.append((method, path))
        if path == "/policies":
            return []
        if path.endswith("/auto"):
            return {"mode": "off", "relaxed": False}
        run = {"id": "r1", "revision": 3, "first_attempt": 1, "target": None, "tags": []}
        return {**run, "warnings": []}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Answers:
    made = Answers()
    monkeypatch.setattr(Client, "call", lambda *given, **options: made.call(*given, **options))
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return made


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    return in_process(monkeypatch, capsys)


def on_terminal(monkeypatch: pytest.MonkeyPatch, is_one: bool) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: is_one, raising=False)


def commands() -> Iterator[tuple[str, Any]]:
    """All commands that take a RUN, with those of other packages."""
    for entry in entry_points(group="paceline.commands"):
        cli._add_plugin(entry)
    group: Any = typer.main.get_command(cli.app)
    waiting: list[tuple[str, Any]] = list(group.commands.items())
    while waiting:
        name, command = waiting.pop()
        if hasattr(command, "commands"):
            waiting += [(f"{name} {each}", inner) for each, inner in command.commands.items()]
        elif any(parameter.name == "run_id" for parameter in command.params):
            yield name, command


def test_every_command_that_takes_a_run_is_sorted(
    main: Main, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the commands that are listed as changes have --yes; the others only read."""
    on_terminal(monkeypatch, False)
    known = dict(commands())
    assert set(CHANGES) <= set(known)
    for name, command in known.items():
        flags = {flag for parameter in command.params for flag in parameter.opts}
        assert ("--yes" in flags) == (name in CHANGES), name
        if name not in CHANGES and name not in ("logs", "audit"):
            with suppress(Exception):  # the answers are no run's
                main(*name.split(), "r1", *READS.get(name, []))
    assert answers.changes == []


@pytest.mark.parametrize(("name", "rest"), CASES)
def test_without_a_terminal_nothing_changes_unless_yes_is_given(
    main: Main, answers: Answers, monkeypatch: pytest.MonkeyPatch, name: str, rest: list[str]
) -> None:
    on_terminal(monkeypatch, False)
    code, out, err = main(*name.split(), "r1", *rest)
    assert (code, out, answers.changes) == (2, "", [])
    assert "--yes" in err
    assert "r1" in err
    assert main(*name.split(), "r1", *rest, "--yes")[0] == 0
    assert answers.changes


@pytest.mark.parametrize(
    ("name", "rest"), [case for case in CASES if not case[0].startswith("runs ")]
)
def test_json_is_never_mixed_with_a_question(
    main: Main, answers: Answers, monkeypatch: pytest.MonkeyPatch, name: str, rest: list[str]
) -> None:
    on_terminal(monkeypatch, True)
    code, out, err = main(name, "r1", *rest, "--json")
    assert (code, out, answers.changes) == (2, "", [])
    assert "--yes" in err
    assert main(name, "r1", *rest, "--json", "--yes")[0] == 0
    assert answers.changes


@pytest.mark.parametrize(("name", "rest"), CASES)
def test_on_a_terminal_no_is_an_answer(
    main: Main, answers: Answers, monkeypatch: pytest.MonkeyPatch, name: str, rest: list[str]
) -> None:
    on_terminal(monkeypatch, True)
    asked: list[str] = []

    def confirm(question: str, **_: Any) -> bool:
        asked.append(question)
        if len(asked) == 1:
            raise typer.Abort
        return True

    monkeypatch.setattr(typer, "confirm", confirm)
    assert main(*name.split(), "r1", *rest)[0] == 1
    assert answers.changes == []
    assert main(*name.split(), "r1", *rest)[0] == 0
    assert answers.changes
    assert all("r1" in question for question in asked)


@pytest.mark.parametrize("name", ["auto", "target"])
def test_a_command_that_only_shows_asks_nothing(
    main: Main, answers: Answers, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    on_terminal(monkeypatch, False)
    assert main(name, "r1")[0] == 0
    assert answers.changes == []
