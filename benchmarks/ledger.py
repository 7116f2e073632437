"""Ledger of the papers' figures and tables: measures rows, and writes docs/ledger.md.

Each row has a command, or a reason why it has none. Without options, all rows with a command are
measured. The measurements are stored in benchmarks/results/ledger.json, with commit, machine and
script. The page and its charts (docs/images/ledger) are generated from this file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from figures.page import page
from figures.recorded import read
from figures.row import Row
from figures.rows import ROWS
from provenance import made_by

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "ledger.json"
PAGE = ROOT / "docs" / "ledger.md"
CHARTS = ROOT / "docs" / "images" / "ledger"


def recorded() -> dict[str, Any]:
    """Return each row's record: date, duration, provenance, values and chart."""
    of: dict[str, Any] = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else {}
    return of


def measure(row: Row) -> dict[str, Any]:
    """Measure a row, and return its record."""
    began = time.perf_counter()
    read.clear()
    of = row.measured()
    chart = None if of.chart is None else _rounded(asdict(of.chart))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "took_s": round(time.perf_counter() - began, 1),
        "made": made_by(ROOT / row.script, row.runs, read),
        "values": {label: _short(float(value)) for label, value in of.values.items()},
        "chart": chart,
    }


def _short(value: Any) -> Any:
    """Round a number to five digits; return anything else unchanged."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _rounded(chart: dict[str, Any]) -> dict[str, Any]:
    for line in chart["lines"]:
        line["x"] = [_short(value) for value in line["x"]]
        line["y"] = [_short(value) for value in line["y"]]
    return chart


def write(record: dict[str, Any], redrawn: Iterable[str]) -> None:
    """Write record and page, and the charts of the rows in `redrawn`."""
    # Keep the papers' order.
    kept = {row: record[row] for row in ROWS if row in record}
    RECORD.write_text(json.dumps({"rows": kept}, ensure_ascii=False, separators=(",", ":")) + "\n")
    PAGE.write_text(page(kept))
    drawn = {row: kept[row] for row in redrawn if row in kept and kept[row]["chart"]}
    if drawn:
        from figures.plots import draw

        draw(drawn, {row: ROWS[row].how.shows for row in drawn}, CHARTS)


def chosen(options: argparse.Namespace) -> list[Row]:
    """Return the rows to measure."""
    if options.only:
        return [ROWS[name] for name in options.only]
    return [row for row in ROWS.values() if row.measure]


def main() -> None:
    """Measure rows, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--list", action="store_true", help="list all rows and their commands")
    which.add_argument(
        "--only", nargs="+", choices=ROWS, metavar="ROW", help="measure only these rows"
    )
    which.add_argument(
        "--page", action="store_true", help="write page and charts without measuring"
    )
    options = parser.parse_args()
    if options.list:
        for row in ROWS.values():
            print(f"{row.id:<26}{row.runs or 'no command: ' + row.why}")
        return
    record = recorded()
    if options.page:
        write(record, record)
        return
    rows = chosen(options)
    for row in rows:
        if not row.measure:
            sys.exit(f"{row.id} has no command: {row.why}")
        print(row.id, file=sys.stderr)
        record[row.id] = measure(row)
        for label, value in record[row.id]["values"].items():
            theirs = row.paper.get(label)
            print(f"{label}: {value}" + ("" if theirs is None else f" (paper: {theirs})"))
        # Save after each row, because a later one may fail.
        write(record, [])
    write(record, [row.id for row in rows])


if __name__ == "__main__":
    main()
