"""Output of several logs on standard output, with the rank that printed each line."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# A terminal executes control characters, and a script may have printed any. The pattern keeps the
# harmless ones: new lines, tabs, carriage returns, and colours.
_CONTROL = re.compile(
    r"(\x1b\[[0-9;]{0,20}m)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


class Log(NamedTuple):
    """The identity of a log."""

    node: str
    rank: int | None
    output: str | None
    attempt: int | None

    @classmethod
    def of(cls, file: dict[str, Any]) -> Log:
        """Return the identity of a listed log."""
        return cls(file["node"], file["rank"], file["output"], file["attempt"])

    @property
    def prefix(self) -> str:
        """Prefix of the log's lines among those of other logs."""
        return f"[{self.node}] " if self.rank is None else f"[rank {self.rank}] "


@dataclass
class Printer:
    """A printer of logs to standard output; with several logs, lines are printed whole."""

    several: bool = False
    # True if the logs are of several ranks.
    prefixed: bool = False
    terminal: bool = field(default_factory=lambda: sys.stdout.isatty())
    # The line of each log that has not ended.
    _rest: dict[Log, str] = field(default_factory=dict)

    def write(self, log: Log, text: str) -> None:
        """Print the next part of a log."""
        if not self.several:
            self._out(text)
            return
        *lines, rest = (self._rest.pop(log, "") + text).split("\n")
        prefix = log.prefix if self.prefixed else ""
        self._out("".join(f"{prefix}{line}\n" for line in lines))
        if rest:
            self._rest[log] = rest

    def finish(self) -> None:
        """Print lines that never ended."""
        for log, rest in self._rest.items():
            self._out(f"{log.prefix if self.prefixed else ''}{rest}\n")
        self._rest.clear()

    def _out(self, text: str) -> None:
        if self.terminal:
            text = safe(text)
        sys.stdout.buffer.write(text.encode(errors="replace"))
        sys.stdout.buffer.flush()


def safe(text: str) -> str:
    """Return a text without control characters that could harm a terminal."""
    return _CONTROL.sub(lambda match: match[1] or ascii(match[0])[1:-1], text)
