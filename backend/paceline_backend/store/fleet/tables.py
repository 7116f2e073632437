"""The tables of the fleet. migrations/ must reproduce exactly this."""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Boolean, Column, Double, ForeignKey, Index, Integer, Table

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
    Column("counted", BigInteger, nullable=False),  # last step that `waiting_days` counts
    Column("counted_attempt", Integer, nullable=False),  # in which that was; -1: none yet
    Column("done", Boolean, nullable=False),  # the run has ended, and all is counted
    sqlite_with_rowid=False,
)

# The time of a run's ranks on a node, and what they waited of it. A row is about a span of a day
# (UTC) in which the price of the node's type stayed the same, as far as it was known when the steps
# were counted. Rows outlast runs, nodes and prices.
waiting_days = Table(
    "waiting_days",
    metadata,
    Column("day", Integer, primary_key=True),  # since 1970-01-01
    Column("run", Text, primary_key=True),
    Column("node", Text, primary_key=True),  # empty: unknown
    Column("type", Text, primary_key=True),  # of the node when the steps were counted
    Column("since", Double, primary_key=True),  # the span's begin: the day's, or a price's
    Column("steps", BigInteger, nullable=False),
    Column("worker_s", Double, nullable=False),  # of all ranks there
    Column("waited_s", Double, nullable=False),
    Column("node_s", Double, nullable=False),  # of the node: the mean of its ranks
    Column("node_waited_s", Double, nullable=False),
    Index("ix_waiting_days_run", "run"),
    sqlite_with_rowid=False,
)

# What an hour of a type of node costs, from a moment until the type's next price.
node_prices = Table(
    "node_prices",
    metadata,
    Column("type", Text, primary_key=True),
    Column("since", Double, primary_key=True),  # Unix time
    Column("amount", Double, nullable=False),
    Column("currency", Text, nullable=False),
    Column("per", Text, nullable=False),  # node worker
    Column("set_at", Double, nullable=False),
    Column("set_by", Text, nullable=False),
    sqlite_with_rowid=False,
)
