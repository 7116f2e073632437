"""Generator of docs/ledger.md from the rows and their records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from figures.row import How, Kind, Row
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
    parts = [HEAD, headline(record), _beside(record), _overview()]
    for paper, rows in PAPERS.items():
        parts.append(f"## {paper}\n")
        parts += [_section(row, record.get(row.id)) for row in rows]
    return "\n".join(parts).rstrip() + "\n"


def headline(record: Record) -> str:
    """Return the sentence that counts measured, independent figures, which README has, too."""
    figures = [row for row in ROWS.values() if row.kind is not Kind.CLAIM]
    compared = {row.id: _independent(row, record) for row in figures}
    numbers = [
        (row, label, apart(row.paper[label], record[row.id]["values"][label]))
        for row in figures
        for label in compared[row.id]
    ]
    near = sum(off is not None and abs(off) <= TENTH for _, _, off in numbers)
    real = sum(row.how in (How.REAL, How.HERE) for row, _, _ in numbers)
    return (
        f"Of the papers' {len(figures)} figures and tables, {sum(map(bool, compared.values()))} "
        "give a number that was measured here without being fed in. They have "
        f"{len(numbers)} such numbers: {real} were measured with real ranks on emulated devices, "
        f"{len(numbers) - real} in a simulation, and {near} of ours are within a tenth of the "
        "paper's.\n"
    )


def _beside(record: Record) -> str:
    """Return the paragraph about rows that the headline does not count."""
    rows = [row for row in ROWS.values() if row.kind is not Kind.CLAIM]
    rest = [row for row in rows if not _independent(row, record)]
    examples = sum(row.how is How.EXAMPLE for row in rest)
    none = sum(row.how is How.NONE for row in rest)
    fed = sum(bool(row.paper) and row.how not in (How.EXAMPLE, How.NONE) for row in rest)
    alone = len(rest) - examples - none - fed
    claims = len(ROWS) - len(rows)
    return (
        f"The other {len(rest)} are not evidence of agreement: {alone} run here, but the paper's "
        f"text gives no number to compare with; in {fed} the paper's numbers were all fed in; "
        f"{examples} are worked examples; {none} are not reproduced. {claims} further rows are "
        'claims without a figure. "Fed in" in a table marks a number of the paper\'s that was an '
        "input here or was fitted, so both agree by construction.\n"
    )


def _independent(row: Row, record: Record) -> list[str]:
    return row.independent(record.get(row.id, {}).get("values", {}))


def _overview() -> str:
    lines = ["| paper | row | what it shows | our figures are |", "|---|---|---|---|"]
    for paper, rows in PAPERS.items():
        lines += [
            f"| {paper} | [{row.title}](#{row.id}) | {row.shows} | {row.how.name.lower()} |"
            for row in rows
        ]
    meanings = "\n".join(f"- *{how.name.lower()}*: {how.value}" for how in How)
    return "\n".join(lines) + "\n\n" + meanings + "\n"


def _section(row: Row, measured: Mapping[str, Any] | None) -> str:
    lines = [f"### {row.id}", "", f"**{row.title}.** {row.shows}.", ""]
    if row.runs:
        lines += [f"`{row.runs}` ({row.how.value}). {row.here}".rstrip(), ""]
    if measured is not None:
        lines += _table(row, measured["values"])
        if measured.get("chart"):
            lines += [f"![{row.title}, {row.how.shows}](images/ledger/{row.id}.svg)", ""]
    if row.why:
        values = {} if measured is None else measured["values"]
        word = "Why they differ" if differs(row, values) else "Note"
        word = "Not done" if row.how is How.NONE else word
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
        said = "fed in" if label in row.fed else said
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
