"""The tables of what scripts measure. migrations/ must reproduce exactly this."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, SmallInteger, Table

from paceline_backend.store.schema import Text, metadata

# One row per metric, step and rank. Only scripts that log more than a loss have any.
worker_metrics = Table(
    "worker_metrics",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),
    Column("weight", Double, nullable=False),  # the rank's samples or load, as for the loss
    Column("value", Double),  # NULL: it was not finite
    sqlite_with_rowid=False,
)

# The same of the global batch: means over ranks by their weights.
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
    Column("step", BigInteger, primary_key=True),  # the last one before it; -1: none
    Column("attempt", SmallInteger, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("trained", BigInteger, nullable=False),  # samples by then, over all ranks
    Column("at", Double, nullable=False),
    Column("samples", BigInteger),  # that the rank evaluated; NULL: rank 0's value counts alone
    Column("value", Double),  # NULL: it was not finite
    sqlite_with_rowid=False,
)
