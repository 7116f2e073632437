"""Metrics of training and of evaluations, and what operators want of a run's model."""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("target", sa.JSON(), nullable=True))
    op.create_table(
        "worker_metrics",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("value", sa.Double()),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_worker_metrics_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "step", "name", "rank", name="pk_worker_metrics"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "step_metrics",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Double()),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_step_metrics_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "name", "step", name="pk_step_metrics"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "evaluations",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("trained", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("samples", sa.BigInteger()),
        sa.Column("value", sa.Double()),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_evaluations_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "step", "attempt", "name", "rank", name="pk_evaluations"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    for table in ("evaluations", "step_metrics", "worker_metrics"):
        op.drop_table(table)
    op.drop_column("runs", "target")
