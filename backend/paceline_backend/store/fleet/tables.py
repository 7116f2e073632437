"""The tables of the fleet. migrations/ must reproduce exactly this."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Column, Double, ForeignKey, Index, Integer, Table

from paceline_backend.store.schema import Text, metadata

# A verdict over a run's newest steps: one row for as long as it names the same causes. Rows outlast
# the runs that they are about: `run` is a public id, and no key.
verdicts = Table(
    "verdicts",
    metadata,
    Column("run", Text, primary_key=True),
    Column("at", Double, primary_key=True),  # of the first verdict that named these causes
    Column("until", Double, nullable=False),  # of the last one
    Column("first_step", BigInteger, nullable=False),  # newest one of the first verdict
    Column("step", BigInteger, nullable=False),  # newest one of the last verdict
    Column("workers", Integer, nullable=False),
    Column("waste", Double, nullable=False),
    Column("share", Double, nullable=False),  # of the wall time, that causes that go on cost
    Column("factor", Double),  # the greatest of causes that go on; NULL: none has one
    Column("nodes", JSON, nullable=False),  # node → {"ranks", "kinds", "share", "factor"}
    Column("body", JSON, nullable=False),  # as GET /runs/{run}/verdict tells it
    Index("ix_verdicts_until", "until"),
    sqlite_with_rowid=False,
)

# How far a run has come, as the worker saw it last.
run_progress = Table(
    "run_progress",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", Integer, nullable=False),  # -1: none yet
    Column("step", BigInteger, nullable=False),  # newest complete one; -1: none yet
    Column("step_at", Double, nullable=False),  # when it was first seen, by the database's clock
    Column("lost", BigInteger, nullable=False),  # records that a full spool has lost
    Column("lost_at", Double),  # when more of them were seen last
    Column("inexact", Integer),  # epochs with samples used twice or skipped; NULL: unknown
    sqlite_with_rowid=False,
)
