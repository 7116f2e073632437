"""The command line ends with a documented exit code and a sentence, whatever its arguments."""

from __future__ import annotations

import pytest

from support.command_line import Main, in_process_often
from support.fuzz import COUNTS, arguments

# Commands that end by themselves; nobody answers at the default address.
GOOD = [
    ["runs", "--state", "running", "--limit", "5"],
    ["policies", "--json"],
    ["switch", "r1", "chronica", "--param", "window=32", "--yes"],
    ["stop", "r1", "--force", "--yes"],
    ["logs", "r1", "--rank", "3", "-n", "5", "--output", "stderr"],
    ["rejected", "list", "--limit", "5"],
    ["rejected", "drop", "1-1", "--json"],
    ["version", "--json"],
]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Main:
    return in_process_often(monkeypatch, capsys)


@pytest.mark.parametrize("count", COUNTS)
def test_no_arguments_are_a_fault_of_the_command_line(main: Main, count: int) -> None:
    codes: set[int] = set()
    for seed, good in enumerate(GOOD):
        for words in arguments(good[1:], 1 + count // len(GOOD), seed):
            code, out, err = main(good[0], *words)
            assert code in (0, 1, 2, 3), (good[0], words)
            assert "Traceback" not in err
            assert (out + err).strip(), (good[0], words)
            codes.add(code)
    assert codes > {0, 2}
