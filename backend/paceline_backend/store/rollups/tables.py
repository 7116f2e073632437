"""Tables of roll-ups. migrations/ must reproduce them exactly."""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, SmallInteger, Table

from paceline_backend.store.schema import metadata

BLOCK = 100  # steps

# Metrics of one step; `metrics.METRICS` derives each from the row of the step.
METRIC_NAMES = (
    *("step_s", "compute_max", "compute_min", "compute_mean", "se", "sp"),
    *("dif", "waste", "ett_error", "comm_s", "loss"),
)


def _of_metrics() -> Iterator[Column[float] | Column[int]]:
    for name in METRIC_NAMES:
        # Number of steps that have a value.
        yield Column(f"{name}_count", Integer, nullable=False)
        for kind in ("sum", "min", "max"):
            yield Column(f"{name}_{kind}", Double)


# One row per block whose steps are all complete.
step_rollups = Table(
    "step_rollups",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # The first step of the block.
    Column("step", BigInteger, primary_key=True),
    # The epoch of the first step.
    Column("epoch", Integer, nullable=False),
    # The end of the last step.
    Column("ended_at", Double, nullable=False),
    *_of_metrics(),
    sqlite_with_rowid=False,
)

# One row per block and rank, for the same blocks.
rank_rollups = Table(
    "rank_rollups",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # The first step of the block.
    Column("step", BigInteger, primary_key=True),
    Column("rank", Integer, primary_key=True),
    # The latest attempt.
    Column("attempt", SmallInteger, nullable=False),
    # Number of records.
    Column("count", Integer, nullable=False),
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
    # Sums over records with samples, to fit the line "time = a · load + b".
    Column("fit_count", Integer, nullable=False),
    Column("fit_load", Double, nullable=False),
    Column("fit_time", Double, nullable=False),
    Column("fit_load_sq", Double, nullable=False),
    Column("fit_load_time", Double, nullable=False),
    sqlite_with_rowid=False,
)

# From this step on, blocks of the run may lack roll-ups, which `fill` adds.
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
