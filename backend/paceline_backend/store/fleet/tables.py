"""Tables of the fleet. migrations/ must reproduce them exactly."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Double, ForeignKey, Index, Integer, Table

from paceline_backend.store.schema import Text, metadata

# Verdicts over a run's newest steps: one row for as long as the causes stay the same. Rows outlive
# the runs that they are about, so `run` is a public id and not a foreign key.
verdicts = Table(
    "verdicts",
    metadata,
    Column("run", Text, primary_key=True),
    # Time of the first and of the last verdict with these causes.
    Column("at", Double, primary_key=True),
    Column("until", Double, nullable=False),
    # The newest step of the first and of the last verdict.
    Column("first_step", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("waste", Double, nullable=False),
    # Fraction of the run time that active causes add.
    Column("share", Double, nullable=False),
    # The greatest factor of the active causes. NULL: none has one.
    Column("factor", Double),
    # Node → {"ranks", "kinds", "share", "factor"}.
    Column("nodes", JSON, nullable=False),
    # As GET /runs/{run}/verdict returns it.
    Column("body", JSON, nullable=False),
    Index("ix_verdicts_until", "until"),
    sqlite_with_rowid=False,
)

# Progress of a run when the worker process last saw it.
run_progress = Table(
    "run_progress",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # The latest attempt. -1: none yet.
    Column("attempt", Integer, nullable=False),
    # The newest complete step. -1: none yet.
    Column("step", BigInteger, nullable=False),
    # When this step was first seen, by the database's clock.
    Column("step_at", Double, nullable=False),
    # Number of records that were lost because a spool was full.
    Column("lost", BigInteger, nullable=False),
    # When this number last increased.
    Column("lost_at", Double),
    # Number of epochs with samples that were used twice or skipped. NULL: unknown.
    Column("inexact", Integer),
    sqlite_with_rowid=False,
)
