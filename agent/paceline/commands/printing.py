"""Output formats of commands: JSON for programs, tables and times for people."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import typer

# Columns with ids of runs or nodes.
_IDS = ("id", "run", "runs", "spare_of")
# Width of a line in characters if the output is not a terminal.
_PIPED = 1_000
# Control characters, which a script may print and a terminal would execute. The pattern does not
# match new lines, tabs and carriage returns, which are harmless. Its group matches colours.
_CONTROL = re.compile(
    r"(\x1b\[[0-9;]{0,20}m)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
)


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    typer.echo(json.dumps(value))


def print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """Print a table for people on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        # Users copy ids, so ids are never wrapped, even in a narrow terminal.
        least = _longest_word(row[column] for row in rows) if column in _IDS else None
        table.add_column(column, min_width=least, no_wrap=column == "id", overflow="fold")
    for row in rows:
        texts = ("" if row[c] is None else str(row[c]) for c in columns)
        table.add_row(*(plain(text.partition("\n")[0]) for text in texts))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A program or a pager reads the output, so lines are made wide enough for all cells.
        console.width = _PIPED
    console.print(table)


def _longest_word(cells: Iterable[Any]) -> int:
    words = (word for cell in cells if cell is not None for word in str(cell).split())
    return max(map(len, words), default=0)


def plain(words: str) -> str:
    """Escape control characters that a client may have put in a text: a terminal executes them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def safe(text: str) -> str:
    """Return a text without control characters that could harm a terminal."""
    return _CONTROL.sub(lambda match: match[1] or ascii(match[0])[1:-1], text)


def money(amount: float, currency: str) -> str:
    """Format an amount with its currency, such as ``1,234.50 EUR``."""
    return f"{amount:,.2f} {currency}"


def spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers as ranges, such as ``0-3, 7``."""
    made: list[list[int]] = []
    for number in numbers:
        if made and number == made[-1][-1] + 1:
            made[-1][1:] = [number]
        else:
            made.append([number])
    return ", ".join("-".join(map(str, span)) for span in made)


def local_time(at: float) -> str:
    """Format a Unix time in the local time zone."""
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")
