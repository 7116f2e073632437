"""The tables of roll-ups. migrations/ must reproduce exactly this."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, SmallInteger, Table

from paceline_backend.store.schema import metadata

BLOCK = 100  # steps

# Of one step; `metrics.METRICS` says how each follows from the row of the step.
METRIC_NAMES = (
    *("step_s", "compute_max", "compute_min", "compute_mean", "se", "sp"),
    *("dif", "waste", "ett_error", "comm_s", "loss"),
)


def _of_metrics() -> Iterator[Column[float] | Column[int]]:
    for name in METRIC_NAMES:
        yield Column(f"{name}_count", Integer, nullable=False)  # of steps that have a value
        for kind in ("sum", "min", "max"):
            yield Column(f"{name}_{kind}", Double)


# One row per block: all of its steps are complete.
step_rollups = Table(
    "step_rollups",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),  # the block's first
    Column("epoch", Integer, nullable=False),  # the first step's
    Column("ended_at", Double, nullable=False),  # the last one's
    *_of_metrics(),
    sqlite_with_rowid=False,
)

# One row per block and rank, of the same blocks.
rank_rollups = Table(
    "rank_rollups",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),  # the block's first
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),  # the latest
    Column("count", Integer, nullable=False),  # of records
    Column("compute_s_sum", Double, nullable=False),
    Column("compute_s_min", Double, nullable=False),
    Column("compute_s_max", Double, nullable=False),
    Column("ett_s_sum", Double),
    Column("ett_s_count", Integer, nullable=False),
    Column("wait_s_sum", Double, nullable=False),
    Column("samples_sum", BigInteger, nullable=False),
    Column("load_sum", Double, nullable=False),
    Column("share_sum", Double),
    Column("share_count", Integer, nullable=False),
    # Over records with samples, for the line "time = a · load + b".
    Column("fit_count", Integer, nullable=False),
    Column("fit_load", Double, nullable=False),
    Column("fit_time", Double, nullable=False),
    Column("fit_load_sq", Double, nullable=False),
    Column("fit_load_time", Double, nullable=False),
    sqlite_with_rowid=False,
)

# From this step on, blocks of the run may lack their roll-ups: `fill` adds them.
rollups_due = Table(
    "rollups_due",
    metadata,
    Column(
        "run",
        BigInteger,
        ForeignKey("runs.key", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    Column("step", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)
