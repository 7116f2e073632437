"""What commands print: JSON for programs, tables and times for people."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import typer

_IDS = ("id", "run", "runs", "spare_of")  # columns with ids of runs or nodes
_PIPED = 1_000  # characters of a line, at most


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(value))


def print_table(columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """A table for people on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    for column in columns:
        # Ids are for copying: show each whole, also in a narrow terminal.
        least = _longest_word(row[column] for row in rows) if column in _IDS else None
        table.add_column(column, min_width=least, no_wrap=column == "id", overflow="fold")
    for row in rows:
        texts = ("" if row[c] is None else str(row[c]) for c in columns)
        table.add_row(*(plain(text.partition("\n")[0]) for text in texts))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED  # a program or a pager reads it: no cell is cut
    console.print(table)


def _longest_word(cells: Iterable[Any]) -> int:
    words = (word for cell in cells if cell is not None for word in str(cell).split())
    return max(map(len, words), default=0)


def plain(words: str) -> str:
    """Without control characters: anybody may have written them, and a terminal obeys them."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def money(amount: float, currency: str) -> str:
    """An amount with its currency, such as ``1,234.50 EUR``."""
    return f"{amount:,.2f} {currency}"


def spans(numbers: Sequence[int]) -> str:
    """Numbers in few words, such as ``0-3, 7``."""
    made: list[list[int]] = []
    for number in numbers:
        if made and number == made[-1][-1] + 1:
            made[-1][1:] = [number]
        else:
            made.append([number])
    return ", ".join("-".join(map(str, span)) for span in made)


def local_time(at: float) -> str:
    """A time for people, of their time zone."""
    return datetime.fromtimestamp(at).astimezone().isoformat(" ", "seconds")
