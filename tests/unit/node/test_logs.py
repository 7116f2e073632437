"""Parts of logs as a node reads them, whatever a script has put into the run's directory."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.node import logs, rundir
from paceline.node.rundir import LauncherStatus, Record
from paceline.wire import RunState, State
from paceline.wire.asking import MOST_LOG_BYTES, LogPart, NotThere, ReadLog


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run whose second attempt is under way."""
    directory = tmp_path / "r"
    directory.mkdir()
    states(directory, State.RUNNING)
    rundir.write(directory / "launcher.json", LauncherStatus(1))
    return directory


def states(directory: Path, *states: State) -> None:
    reported = [RunState(state, 1.0, "here") for state in states]
    rundir.write(directory / "run.json", Record("r", "here", "the agent", "id", reported))


def write(directory: Path, attempt: int, rank: int, content: bytes, output: str = "stdout") -> Path:
    path = rundir.rank_log(directory, attempt, rank, output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def part(directory: Path, rank: int | None = 0, **more: Any) -> LogPart:
    answer = logs.part(directory, ReadLog(rank, **more))
    assert isinstance(answer, LogPart), answer
    return answer


def test_a_log_is_read_part_by_part(run: Path) -> None:
    write(run, 0, 0, b"0123456789")
    parts = [part(run, offset=offset, limit=4) for offset in (0, 4, 8, 10)]
    assert [(each.offset, each.data) for each in parts] == [
        (0, b"0123"),
        (4, b"4567"),
        (8, b"89"),
        (10, b""),
    ]
    assert {each.size for each in parts} == {10}


def test_beyond_its_end_a_log_has_nothing(run: Path) -> None:
    write(run, 0, 0, b"0123")
    assert part(run, offset=2**52) == LogPart(0, 4, b"", 4, False)


def test_an_offset_below_zero_counts_from_the_end(run: Path) -> None:
    write(run, 0, 0, b"0123456789")
    assert part(run, offset=-3) == LogPart(0, 7, b"789", 10, False)
    assert part(run, offset=-300).offset == 0
    assert part(run, offset=-5, limit=2).data == b"56"


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_part_from_the_end_begins_with_a_whole_character(run: Path, cut: int) -> None:
    content = "ab€😀".encode()  # of 1, 1, 3 and 4 bytes
    write(run, 0, 0, content)
    read = part(run, offset=-cut)
    assert read.data.decode() in "ab€😀"
    assert content[read.offset :] == read.data
    assert len(content) - cut <= read.offset < len(content) - cut + 4


@pytest.mark.parametrize(
    ("content", "lines", "expected"),
    [
        (b"a\nb\nc\n", 1, b"c\n"),
        (b"a\nb\nc\n", 2, b"b\nc\n"),
        (b"a\nb\nc\n", 9, b"a\nb\nc\n"),
        (b"a\nb\nrest", 2, b"b\nrest"),
        (b"\n\n\n", 2, b"\n\n"),
        (b"one long line", 1, b"one long line"),
        (b"", 3, b""),
    ],
)
def test_the_last_lines(run: Path, content: bytes, lines: int, expected: bytes) -> None:
    write(run, 0, 0, content)
    read = part(run, lines=lines)
    assert (read.offset, read.data) == (len(content) - len(expected), expected)


def test_a_log_that_is_too_long_keeps_its_beginning_and_its_end(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank adds meanwhile has the place that it would have had."""
    monkeypatch.setattr(logs, "KEPT_FIRST", 4096)
    monkeypatch.setattr(logs, "KEPT_LAST", 8192)
    content = b"".join(b"line %07d\n" % number for number in range(10_000))
    cut = content[:4095] + "€".encode() + content[4098:]  # a character across the edge
    path = write(run, 0, 0, cut[:20_000])
    with path.open("r+b", buffering=0) as rank:
        rank.seek(0, os.SEEK_END)
        logs.shorten(path)
        assert path.stat().st_blocks * 512 >= 20_000, "it may have twice as much at its end"
        rank.write(cut[20_000:])
        logs.shorten(path)
        rank.write(b"later\n")
    size = len(cut) + 6
    assert path.stat().st_size == size
    assert path.stat().st_blocks * 512 <= 4096 + 2 * 8192 + 4096
    read, offset = [], 0
    while (matches := part(run, offset=offset, limit=3000)).data:
        read.append(matches)
        offset = matches.offset + len(matches.data.decode(errors="ignore").encode())
    first = b"".join(each.data for each in read if each.offset < 4096)
    last = b"".join(each.data for each in read if each.offset >= 4096)
    assert first.decode(errors="ignore").encode() == content[:4095]
    assert last == (cut + b"later\n")[-len(last) :]
    assert 8192 <= len(last) < 8192 + 4096 + 6
    assert part(run, lines=1).data == b"later\n"


def test_a_log_on_a_file_system_that_frees_no_part_starts_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(logs, "KEPT_FIRST", 4096)
    monkeypatch.setattr(logs, "KEPT_LAST", 4096)
    monkeypatch.setattr(logs, "_free", refuse)
    path = write(run, 0, 0, b"x" * 20_000)
    with path.open("r+b", buffering=0) as rank:
        rank.seek(0, os.SEEK_END)
        logs.shorten(path)
        assert part(run, offset=20_000).data == b""
        rank.write(b"later\n")
    assert part(run, offset=0) == LogPart(0, 20_000, b"later\n", 20_006, False)


def test_the_last_lines_are_no_more_than_the_limit(run: Path) -> None:
    write(run, 0, 0, b"first\n" + "€".encode() * 100 + b"\nlast\n")
    assert part(run, lines=1, limit=16).data == b"last\n"
    read = part(run, lines=2, limit=16)
    assert read.data == "€€€".encode() + b"\nlast\n"
    assert read.size == read.offset + len(read.data)


def test_no_part_is_longer_than_an_answer_may_be(run: Path) -> None:
    write(run, 0, 0, bytes(2 * MOST_LOG_BYTES))
    assert len(part(run, limit=MOST_LOG_BYTES).data) == MOST_LOG_BYTES
    assert len(part(run, lines=1, limit=MOST_LOG_BYTES).data) <= MOST_LOG_BYTES


def test_the_newest_attempt_of_a_rank_unless_another_is_wanted(run: Path) -> None:
    write(run, 0, 0, b"zero")
    write(run, 10, 0, b"ten")
    write(run, 2, 0, b"two")
    write(run, 11, 1, b"of another rank")
    assert (part(run).attempt, part(run).data) == (10, b"ten")
    assert part(run, attempt=2).data == b"two"
    answer = logs.part(run, ReadLog(0, attempt=3))
    assert answer == NotThere("it has no logs/attempt_3/0/stdout.log")
    assert isinstance(logs.part(run, ReadLog(7)), NotThere)


def test_a_log_may_grow_while_its_attempt_lasts(run: Path) -> None:
    for attempt in (0, 1):
        write(run, attempt, 0, b"x")
    assert [part(run, attempt=attempt).may_grow for attempt in (0, 1)] == [False, True]
    (run / "launcher.log").write_text("started\n")
    assert part(run, None).may_grow
    states(run, State.RUNNING, State.FAILED)
    assert [part(run, attempt=attempt).may_grow for attempt in (0, 1)] == [False, False]
    assert part(run, None) == LogPart(None, 0, b"started\n", 8, False)


def test_logs_are_listed_with_the_newest_attempts_first(run: Path) -> None:
    (run / "launcher.log").write_text("launcher")
    write(run, 0, 0, b"x")
    write(run, 1, 10, b"xyz", "stderr")
    write(run, 1, 9, b"xy")
    files = logs.listed(run, 0)
    assert [(f.rank, f.output, f.attempt, f.size, f.may_grow) for f in files] == [
        (None, None, None, 8, True),
        (9, "stdout", 1, 2, True),
        (10, "stderr", 1, 3, True),
        (0, "stdout", 0, 1, False),
    ]
    assert [file.attempt for file in logs.listed(run, 1)] == [None, 1, 1]


def test_what_is_listed_is_bounded(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_LOGS", 5)
    for attempt in range(5):
        for rank in range(3):
            write(run, attempt, rank, b"")
    assert [file.attempt for file in logs.listed(run, 0)] == [4, 4, 4, 3, 3]


def test_an_empty_directory_has_no_logs(run: Path) -> None:
    assert logs.listed(run, 0) == []
    assert isinstance(logs.part(run, ReadLog(None)), NotThere)


def _link_to_a_file(log: Path, secret: Path) -> None:
    log.symlink_to(secret)


def _hard_parent(log: Path, secret: Path) -> None:
    log.parent.rmdir()
    log.parent.symlink_to(secret.parent)
    (secret.parent / log.name).write_text("secret")


def _pipe(log: Path, _: Path) -> None:
    os.mkfifo(log)


def _folder(log: Path, _: Path) -> None:
    log.mkdir()


def _socket(log: Path, _: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(log))


@pytest.mark.parametrize("put", [_link_to_a_file, _hard_parent, _pipe, _folder, _socket])
def test_nothing_but_a_log_is_read(
    run: Path, tmp_path: Path, put: Callable[[Path, Path], None]
) -> None:
    """A pipe would hold up the agent for ever, and a link leads to any file of its user."""
    secret = tmp_path / "elsewhere" / "token"
    secret.parent.mkdir()
    secret.write_text("secret")
    log = write(run, 1, 0, b"")
    log.unlink()
    put(log, secret)
    assert isinstance(logs.part(run, ReadLog(0, attempt=1)), NotThere)


def test_odd_names_are_left_out(run: Path) -> None:
    write(run, 1, 0, b"x")
    folder = run / "logs"
    for name in ("attempt_x", "attempt_-1", "attempt_١", "attempt_" + 50 * "9", "attempt_01", "1"):
        (folder / name / "0").mkdir(parents=True)
    (folder / "attempt_2").write_text("a file")
    (folder / "attempt_1" / "rank").mkdir()
    assert [(file.attempt, file.rank) for file in logs.listed(run, 0)] == [(1, 0)]
