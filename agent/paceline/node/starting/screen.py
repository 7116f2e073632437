"""A run's progress below its script's output: live in a terminal, as plain lines elsewhere.

`shown` provides a `Terminal` if standard error is a terminal, else a `Plain`. `Terminal` writes the
script's lines above the progress once they are complete. A line that is not complete yet, such as a
progress bar of the script, is shown as far as it was printed.
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
from paceline.node.starting.progress import Progress, ProgressPoller

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, Group, RenderResult

_DRAW_S = 0.25
# Seconds between two plain lines if only the step has changed.
_SAY_S = 60.0
# Maximum number of characters kept of a line that has no newline yet.
_LONGEST_LINE = 65_536
_BAR = 16
_STYLES = {"held-up": "bold red", "watch": "yellow"}


class Screen(Protocol):
    """Display of a run's output and progress."""

    def writer(self, stream: IO[bytes]) -> Callable[[bytes], None]:
        """Return a function that copies the script's output to one of this process's streams."""

    def tick(self) -> None:
        """Draw changes; call it a few times a second."""


@contextmanager
def shown(watch: ProgressPoller | None) -> Iterator[Screen]:
    """Provide the screen for a run's output and progress; `watch` None: only for the output."""
    if watch is None:
        yield Plain(None)
        return
    from rich.console import Console

    # The console writes to the terminal even when `sys.stderr` is replaced by `_Above`.
    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        with watch:
            yield Plain(watch)
        return
    terminal = Terminal(console, watch)
    with watch, terminal:
        yield terminal


class Plain:
    """Progress as plain lines without control codes; `watch` None: no progress is shown."""

    def __init__(self, watch: ProgressPoller | None) -> None:
        self._watch = watch
        self._said: tuple[object, ...] = ()
        self._step: int | None = None
        self._at = 0.0

    def writer(self, stream: IO[bytes]) -> Callable[[bytes], None]:
        """Return a function that writes to a stream unchanged."""
        return copying(stream)

    def tick(self) -> None:
        """Print a line for a new epoch, policy or verdict; for a new step alone, once a minute."""
        if self._watch is None or (now := self._watch.now).step is None:
            return
        news = (now.epoch, now.policy, now.level, now.verdict)
        late = now.step != self._step and time.monotonic() - self._at > _SAY_S
        if news != self._said or late:
            self._said, self._step, self._at = news, now.step, time.monotonic()
            sys.stderr.write(f"paceline: {_printable(now.line)}\n")
            sys.stderr.flush()


class Terminal:
    """The progress in the last lines of a terminal; a context manager."""

    def __init__(self, console: Console, watch: ProgressPoller) -> None:
        from rich.live import Live

        self._watch = watch
        self._console = console
        # The last line of the output, which has no newline yet.
        self._open = ""
        self._live = Live(
            console=console,
            get_renderable=self._drawn,
            auto_refresh=False,
            # The progress disappears at the end, because it is not part of the output.
            transient=True,
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
        """Return a function that writes above the progress, or to `stream` if it is no terminal."""
        if not stream.isatty():
            return copying(stream)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda data: self.write(decoder.decode(data))

    def write(self, text: str) -> None:
        """Write text above the progress. A line without a newline is kept until it is complete."""
        whole, newline, rest = (self._open + text).rpartition("\n")
        if newline:
            self._print(whole + newline)
        # If a line was overwritten repeatedly, such as a progress bar, keep only its last version.
        head, _, last = rest.rstrip("\r").rpartition("\r")
        self._open = last if head or last else rest
        if len(self._open) > _LONGEST_LINE:
            self._print(self._open + "\n")
            self._open = ""
        self._draw()

    def tick(self) -> None:
        """Draw the progress, unless it was drawn just now; call this often."""
        if time.monotonic() - self._drawn_at >= _DRAW_S:
            self._draw()

    def _print(self, text: str) -> None:
        self._console.print(_Raw(text), end="", crop=False, soft_wrap=True)

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._live.refresh()

    def _drawn(self) -> Group:
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
            row.append(" · server unreachable; training continues", "yellow")
        elif now.judged:
            row.append(" · ")
            row.append(_printable(now.judged), _STYLES.get(now.level, ""))
        elif now.level == "healthy":
            row.append(" · OK", "green")
        return row


class _Raw:
    """Text that is written to the terminal unchanged, with its colours and control codes."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __rich_console__(self, _: Console, __: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        yield Segment(self._text)


class _Above(io.TextIOBase):
    """Standard error while the progress is drawn; its text appears above the progress."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        # Some callers write bytes to `buffer`.
        self.buffer = sys.stderr.buffer

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._terminal.write(text)
        return len(text)


def _printable(words: str) -> str:
    """Escape control characters, which a terminal would execute."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)
