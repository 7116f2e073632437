"""Roll-ups of 100 steps, and runs that are being pruned.

What was stored before has no roll-ups yet: it is read step by step until the worker has filled
them in.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_METRICS = (
    *("step_s", "compute_max", "compute_min", "compute_mean", "se", "sp"),
    *("dif", "waste", "ett_error", "comm_s", "loss"),
)


def _double(name: str, nullable: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double(), nullable=nullable)


def _integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=False)


def _big(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def _of_run(table: str, *key: str) -> list[sa.schema.SchemaItem]:
    name = f"fk_{table}_run_runs"
    return [
        sa.ForeignKeyConstraint(["run"], ["runs.key"], name=name, ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", *key, name=f"pk_{table}"),
    ]


def _steps() -> None:
    metrics: list[sa.schema.SchemaItem] = []
    for name in _METRICS:
        metrics.append(_integer(f"{name}_count"))
        metrics += [_double(f"{name}_{kind}", nullable=True) for kind in ("sum", "min", "max")]
    op.create_table(
        "step_rollups",
        _big("run"),
        _big("step"),
        _integer("epoch"),
        _double("ended_at"),
        *metrics,
        *_of_run("step_rollups", "step"),
        sqlite_with_rowid=False,
    )


def upgrade() -> None:
    op.add_column("runs", sa.Column("pruned_at", sa.Double()))
    _steps()
    op.create_table(
        "rank_rollups",
        _big("run"),
        _big("step"),
        _integer("rank"),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        _integer("count"),
        _double("compute_s_sum"),
        _double("compute_s_min"),
        _double("compute_s_max"),
        _double("ett_s_sum", nullable=True),
        _integer("ett_s_count"),
        _double("wait_s_sum"),
        _big("samples_sum"),
        _double("load_sum"),
        _double("share_sum", nullable=True),
        _integer("share_count"),
        _integer("fit_count"),
        _double("fit_load"),
        _double("fit_time"),
        _double("fit_load_sq"),
        _double("fit_load_time"),
        *_of_run("rank_rollups", "step", "rank"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.execute("DELETE FROM meta WHERE name = 'rollups'")
    op.drop_table("rank_rollups")
    op.drop_table("step_rollups")
    op.drop_column("runs", "pruned_at")
