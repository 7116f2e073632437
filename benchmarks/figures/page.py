"""Generator of docs/ledger.md from the rows and their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from figures.row import How, Kind, Mark, Row
from figures.rows import PAPERS, ROWS

TENTH = 0.1

# Row → its measurement, see `ledger.recorded`.
Record = Mapping[str, Mapping[str, Any]]

HEAD = """# The ledger

Every figure and table of the five papers: what it shows, the command that reproduces it here,
their figures, our figures, and why they differ. Made by `benchmarks/ledger.py` from its rows
(`benchmarks/figures`) and what they measured (`benchmarks/results/ledger.json`).
[papers.md](papers.md) says more about some of them.

```sh
python benchmarks/ledger.py --list                  # all rows
python benchmarks/ledger.py --only chronica-fig-9   # measures one, and writes this page
python benchmarks/ledger.py                         # all, on a busy machine in half an hour
python benchmarks/ledger.py --page                  # writes this page and its charts again
```

Their figures are numbers of a paper's text and tables. Where there is a dash, the text gives no
number: the value would have to be read off a picture, which is not possible from the text.
"Apart" is ours over theirs, less 1. Charts show the papers' numbers as black marks. Each chart
carries how it came about, and has a JSON file beside it with the commit, the command, the machine
and the script.
"""


def page(record: Record) -> str:
    """Return the whole page in Markdown."""
    parts = [HEAD, headline(record), _beside(record), _overview(record)]
    for paper, rows in PAPERS.items():
        parts.append(f"## {paper}\n")
        parts += [_section(row, record.get(row.id)) for row in rows]
    return "\n".join(parts).rstrip() + "\n"


def headline(record: Record) -> str:
    """Return the sentences that count figures by mark, which README has, too."""
    rows = [row for row in ROWS.values() if row.kind is not Kind.CLAIM]
    marks = [row.mark(_values(row, record)) for row in rows]
    compared = {row.id: row.compared(_values(row, record)) for row in rows}
    numbers = [
        (row, apart(row.paper[label], _values(row, record)[label]))
        for row in rows
        for label in compared[row.id]
    ]
    near = sum(off is not None and abs(off) <= TENTH for _, off in numbers)
    real = sum(row.how in (How.REAL, How.HERE) for row, _ in numbers)
    independent = marks.count(Mark.INDEPENDENT)
    return (
        f"Of the papers' {len(rows)} figures and tables, {independent} were computed here "
        f"independently, in {marks.count(Mark.FED)} all of the paper's numbers were fed in, and "
        f"{marks.count(Mark.MISSING)} are not reproduced. Of the {independent}, "
        f"{sum(map(bool, compared.values()))} have numbers to compare with: {len(numbers)}, of "
        f"which {real} were measured with real ranks on emulated devices and "
        f"{len(numbers) - real} in a simulation. {near} of ours are within a tenth of the "
        "paper's.\n"
    )


def _beside(record: Record) -> str:
    """Return the paragraphs about rows without numbers to compare, and about the marks."""
    rows = [row for row in ROWS.values() if row.kind is not Kind.CLAIM]
    independent = [row for row in rows if row.mark(_values(row, record)) is Mark.INDEPENDENT]
    rest = [row for row in independent if not row.compared(_values(row, record))]
    examples = sum(row.how is How.EXAMPLE for row in rest)
    return (
        f"The other {len(rest)} are not evidence of agreement: for {len(rest) - examples} the "
        f"paper's text gives no number, and {examples} are worked examples. "
        f"{len(ROWS) - len(rows)} further rows are claims without a figure.\n\n"
        "Each row has one mark:\n\n"
        f"- *{Mark.INDEPENDENT}*: our figures do not equal the paper's by construction; if some "
        "do, they are counted, with the reason\n"
        f"- *{Mark.FED}*: all numbers that the paper gives were inputs here or were fitted, so "
        "ours equal them by construction\n"
        f"- *{Mark.MISSING}*: nothing here corresponds to the paper's result\n"
    )


def _values(row: Row, record: Record) -> Mapping[str, float]:
    values: Mapping[str, float] = record.get(row.id, {}).get("values", {})
    return values


def _overview(record: Record) -> str:
    lines = ["| paper | row | what it shows | mark | our figures are |", "|---|---|---|---|---|"]
    for paper, rows in PAPERS.items():
        lines += [
            f"| {paper} | [{row.title}](#{row.id}) | {row.shows} | "
            f"{row.marked(_values(row, record))} | {row.how.label} |"
            for row in rows
        ]
    meanings = "\n".join(f"- *{how.label}*: {how.value}" for how in How if how is not How.NONE)
    return "\n".join(lines) + "\n\n" + meanings + "\n"


def _section(row: Row, measured: Mapping[str, Any] | None) -> str:
    values: Mapping[str, float] = {} if measured is None else measured["values"]
    lines = [f"### {row.id}", "", f"**{row.title}.** {row.shows}.", ""]
    lines += [f"Mark: {row.marked(values)}.", ""]
    if row.runs:
        lines += [f"`{row.runs}` ({row.how.value}). {row.here}".rstrip(), ""]
    if measured is not None:
        lines += _table(row, measured["values"])
        if measured.get("chart"):
            lines += [f"![{row.title}, {row.how.shows}](images/ledger/{row.id}.svg)", ""]
    if row.why and row.how is not How.NONE:
        word = "Why they differ" if differs(row, values) else "Note"
        lines += [f"{word}: {row.why}", ""]
    return "\n".join(lines)


def _table(row: Row, ours: Mapping[str, float]) -> list[str]:
    labels = [*row.paper, *(label for label in ours if label not in row.paper)]
    unit = f" ({row.unit})" if row.unit else ""
    lines = [f"| what{unit} | theirs | ours | apart |", "|---|---:|---:|---:|"]
    for label in labels:
        theirs, own = row.paper.get(label), ours.get(label)
        off = apart(theirs, own)
        said = "–" if off is None else f"{100 * off:+.0f} %"
        said = Mark.MISSING if theirs is not None and own is None else said
        said = Mark.FED if label in row.fed else said
        lines.append(f"| {label} | {_number(theirs)} | {_number(own)} | {said} |")
    return [*lines, ""]


def apart(theirs: float | None, ours: float | None) -> float | None:
    """Return ours / theirs − 1, or None if either is unknown or theirs is 0."""
    if theirs is None or ours is None or not theirs:
        return None
    return ours / theirs - 1


def differs(row: Row, ours: Mapping[str, float]) -> list[str]:
    """Return the labels whose two figures differ by more than a tenth."""
    offs = {label: apart(theirs, ours.get(label)) for label, theirs in row.paper.items()}
    return [label for label, off in offs.items() if off is not None and abs(off) > TENTH]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
