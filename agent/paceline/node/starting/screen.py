"""A run's progress below what its script prints: live in a terminal, as plain lines elsewhere.

`shown` gives the right one of both for standard error. What a script prints goes through `write`,
so that its lines come out whole, above the progress, and a line that it has not ended yet (such as
a progress bar of its own) is shown as far as it has come.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Protocol

from paceline.node.output import copying
from paceline.node.starting.progress import Progress, Watch

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult

_DRAW_S = 0.25
_SAY_S = 60.0  # between two plain lines with nothing new but the step
_LONGEST = 65_536  # characters of a line that has no end
_BAR = 16  # columns
_STYLES = {"held-up": "bold red", "watch": "yellow"}


class Screen(Protocol):
    """Where a run's output and its progress appear."""

    def writer(self, stream: IO[bytes]) -> Callable[[bytes], None]:
        """A function that copies what a script printed to a standard stream of this process."""

    def tick(self) -> None:
        """Draws what is new; call it a few times a second."""


@contextmanager
def shown(watch: Watch | None) -> Iterator[Screen]:
    """The screen of a run whose progress `watch` knows; None: only the script's output."""
    if watch is None:
        yield Plain(None)
        return
    from rich.console import Console

    # Its file stays the terminal when `sys.stderr` becomes what writes above the progress.
    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        with watch:
            yield Plain(watch)
        return
    terminal = Terminal(console, watch)
    with watch, terminal:
        yield terminal


class Plain:
    """Lines without control codes: one when something changes, else one a minute.

    Args:
        watch: knows the progress; None: nothing is said of it.
    """

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._said: tuple[object, ...] = ()
        self._step: int | None = None
        self._at = 0.0

    def writer(self, stream: IO[bytes]) -> Callable[[bytes], None]:
        """See `Screen`."""
        return copying(stream)

    def tick(self) -> None:
        """See `Screen`."""
        if self._watch is None or (now := self._watch.now).step is None:
            return
        news = (now.epoch, now.policy, now.level, now.verdict)
        late = now.step != self._step and time.monotonic() - self._at > _SAY_S
        if news != self._said or late:
            self._said, self._step, self._at = news, now.step, time.monotonic()
            sys.stderr.write(f"paceline: {_printable(now.line)}\n")
            sys.stderr.flush()


class Terminal:
    """The progress in the last lines of a terminal; a context manager.

    Args:
        console: of standard error.
        watch: knows the progress.
    """

    def __init__(self, console: Console, watch: Watch) -> None:
        from rich.live import Live

        self._watch = watch
        self._console = console
        self._open = ""  # the line that the script has not ended yet
        self._live = Live(
            console=console,
            get_renderable=self._drawn,
            auto_refresh=False,
            transient=True,  # the last progress is no part of the output
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._drawn_at = 0.0
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Terminal:
        self._held.enter_context(self._live)
        self._held.enter_context(contextlib.redirect_stderr(_Above(self)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._open:
            self._print(self._open + "\n")
            self._open = ""
        self._held.close()

    def writer(self, stream: IO[bytes]) -> Callable[[bytes], None]:
        """See `Screen`."""
        if not stream.isatty():
            return copying(stream)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda data: self.write(decoder.decode(data))

    def write(self, text: str) -> None:
        """Puts text above the progress. The last line waits for its end."""
        whole, newline, rest = (self._open + text).rpartition("\n")
        if newline:
            self._print(whole + newline)
        # Of a line that is rewritten over and over, the newest state is enough.
        head, _, last = rest.rstrip("\r").rpartition("\r")
        self._open = last if head or last else rest
        if len(self._open) > _LONGEST:
            self._print(self._open + "\n")
            self._open = ""
        self._draw()

    def tick(self) -> None:
        """See `Screen`."""
        if time.monotonic() - self._drawn_at >= _DRAW_S:
            self._draw()

    def _print(self, text: str) -> None:
        self._console.print(_Raw(text), end="", crop=False, soft_wrap=True)

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._live.refresh()

    def _drawn(self) -> Group:
        """The open line, figures with a bar, and policy with verdict: each in one row."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        now = self._watch.now
        rows: list[object] = []
        if self._open:
            rows.append(Text.from_ansi(self._open, no_wrap=True, overflow="ellipsis"))
        figures = Text(" · ".join(now.figures), no_wrap=True, overflow="ellipsis")
        grid = Table.grid(padding=(0, 1, 0, 0))
        if now.steps is not None and now.step is not None:
            grid.add_column(width=_BAR)
            grid.add_column()
            grid.add_row(ProgressBar(total=1.0, completed=now.share, width=_BAR), figures)
        else:
            grid.add_row(figures)
        rows += [grid, self._second(now)]
        return Group(*rows)  # type: ignore[arg-type]

    def _second(self, now: Progress) -> object:
        from rich.text import Text

        row = Text(no_wrap=True, overflow="ellipsis")
        row.append("paceline", "bold cyan")
        if now.policy:
            row.append(f" · policy {now.policy}")
        if now.away:
            row.append(" · the server says nothing; training goes on", "yellow")
        elif now.judged:
            row.append(" · ")
            row.append(_printable(now.judged), _STYLES.get(now.level, ""))
        elif now.level == "healthy":
            row.append(" · nothing holds it up", "green")
        return row


class _Raw:
    """Text that goes to the terminal as it is, with colours and whatever else is in it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, _: Console, __: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        yield Segment(self._text)


class _Above(io.TextIOBase):
    """Standard error while the progress is drawn: lines of our own go above it."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self.buffer = sys.stderr.buffer  # for those who write bytes

    def writable(self) -> bool:
        """True."""
        return True

    def isatty(self) -> bool:
        """True: what stands behind it is a terminal."""
        return True

    def write(self, text: str) -> int:
        """Writes above the progress."""
        self._terminal.write(text)
        return len(text)


def _printable(words: str) -> str:
    """Without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
