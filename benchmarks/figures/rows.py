"""All rows of the ledger in the papers' order, read from `rows.yaml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from figures.row import How, Row


def _row(fields: dict[str, Any]) -> Row:
    fed = tuple(fields.get("fed", ()))
    return Row(**{**fields, "how": How[fields["how"]], "fed": fed})


def _papers() -> dict[str, tuple[Row, ...]]:
    papers = msgspec.yaml.decode(Path(__file__).with_name("rows.yaml").read_bytes())
    return {paper: tuple(map(_row, rows)) for paper, rows in papers.items()}


PAPERS = _papers()
ROWS: dict[str, Row] = {row.id: row for rows in PAPERS.values() for row in rows}
