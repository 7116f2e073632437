"""All rows of the ledger."""

from __future__ import annotations

from figures import chronica_rows, dynamic_batching_rows, lbb_rows, rna_rows, sata_rows
from figures.row import Row

PAPERS: dict[str, tuple[Row, ...]] = {
    "CHRONICA": chronica_rows.ROWS,
    "SATA": sata_rows.ROWS,
    "LBB": lbb_rows.ROWS,
    "Dynamic batching": dynamic_batching_rows.ROWS,
    "RNA": rna_rows.ROWS,
}
ROWS: dict[str, Row] = {row.id: row for rows in PAPERS.values() for row in rows}
