"""Tables of the metrics that scripts report. migrations/ must reproduce them exactly."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, SmallInteger, Table

from paceline_backend.store.schema import Text, metadata

# One row per metric, step and rank. Only scripts that log more than a loss have rows.
worker_metrics = Table(
    "worker_metrics",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),
    # The rank's samples or load, as for the loss.
    Column("weight", Double, nullable=False),
    # NULL: not a finite number.
    Column("value", Double),
    sqlite_with_rowid=False,
)

# The same for the global batch: means over ranks by their weights.
step_metrics = Table(
    "step_metrics",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("value", Double),
    sqlite_with_rowid=False,
)

# One row per metric of an evaluation and rank that counts.
evaluations = Table(
    "evaluations",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # The last step before the evaluation; -1: none.
    Column("step", BigInteger, primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    # Samples that the run had trained on by then, over all ranks.
    Column("trained", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    # Samples that the rank evaluated. NULL: only rank 0's value counts.
    Column("samples", BigInteger),
    # NULL: not a finite number.
    Column("value", Double),
    sqlite_with_rowid=False,
)
