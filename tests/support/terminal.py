"""A program in a pseudo-terminal, and what stands on the terminal's screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from support.waiting import DEADLINE_S, until

ROWS, COLUMNS = 40, 120
_CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()][A-Z0-9]|\x1b[=>78]|\r|\n|\x08|[^\x1b]")


class Screen:
    """What a terminal shows: the codes that our programs use, and no others."""

    def __init__(self, rows: int = ROWS, columns: int = COLUMNS) -> None:
        self.columns, self.rows = columns, rows
        self.lines: list[str] = [""]  # all that ever was there; what is overwritten is gone
        self.row = self.column = 0
        self.hidden = False
        self._top = 0  # the first line of the screen

    def feed(self, text: str) -> None:
        """Obeys a program's output."""
        at = 0
        while at < len(text):
            match = _CODE.match(text, at)
            assert match is not None, f"a code that is not known: {text[at : at + 12]!r}"
            at = match.end()
            if match[2]:
                self._code(match[1], match[2])
            elif match[0] == "\r":
                self.column = 0
            elif match[0] == "\n":
                self._down()
            elif not match[0].startswith("\x1b"):
                self._put(match[0])

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)

    @property
    def visible(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines[self._top :])

    def _down(self) -> None:
        self.row += 1
        while len(self.lines) <= self.row:
            self.lines.append("")
        self._top = max(self._top, self.row - self.rows + 1)

    def _put(self, character: str) -> None:
        if self.column >= self.columns:
            self._down()
            self.column = 0
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + character + line[self.column + 1 :]
        self.column += 1

    def _code(self, given: str, what: str) -> None:
        number = int(given) if given.isdigit() else 1
        if what == "A":
            self.row = max(self._top, self.row - number)
        elif what == "K":
            line = self.lines[self.row]
            self.lines[self.row] = "" if given == "2" else line[: self.column]
        elif what == "H":
            self.row, self.column = self._top, 0
        elif what == "J":
            self.lines[self._top :] = [""] * (len(self.lines) - self._top)
        elif what in "hl" and given == "?25":
            self.hidden = what == "l"
        else:
            assert what == "m", f"a code that is not known: {given!r} {what!r}"


class Session:
    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.screen = Screen()
        self.raw = ""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def wait_for(self, words: str) -> None:
        try:
            until(lambda: words in self.screen.visible or self.process.poll() is not None, words)
            assert words in self.screen.text
        except AssertionError as error:
            raise AssertionError(f"{words!r} is not on the screen:\n{self.screen.text}") from error

    def end(self) -> int:
        """The exit code; afterwards the screen is complete."""
        code = self.process.wait(DEADLINE_S)
        self._thread.join(DEADLINE_S)
        return code

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                new = os.read(self._descriptor, 65_536)
            except OSError:  # the program has ended
                return
            if not new:
                return
            text, rest = _whole(rest + new)
            self.raw += text
            self.screen.feed(text)


def _whole(data: bytes) -> tuple[str, bytes]:
    """What can be read by now: characters and codes that have come to their ends."""
    for end in range(len(data), max(-1, len(data) - 16), -1):
        try:
            text = data[:end].decode()
        except UnicodeDecodeError:
            continue
        begun = text.rfind("\x1b")
        if begun >= 0 and _CODE.match(text, begun) is None:
            return text[:begun], text[begun:].encode() + data[end:]
        return text, data[end:]
    return "", data


@contextmanager
def in_terminal(command: Sequence[str], env: dict[str, str] | None = None) -> Iterator[Session]:
    """Runs a command in a terminal of 120 columns and 40 rows, and ends it."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    process = subprocess.Popen(
        command,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        env={**environment, "TERM": "xterm-256color", **(env or {})},
        start_new_session=True,
    )
    os.close(terminal)
    session = Session(process, controller)
    try:
        yield session
    finally:
        if process.poll() is None:
            process.kill()
        session.end()
        os.close(controller)
