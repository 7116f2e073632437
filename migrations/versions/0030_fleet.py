"""Verdicts as they changed, the progress of runs, and time spent waiting by day."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "verdicts",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("waste", sa.Double(), nullable=False),
        sa.Column("share", sa.Double(), nullable=False),
        sa.Column("factor", sa.Double()),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run", "at", name="pk_verdicts"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_verdicts_until", "verdicts", ["until"])
    op.create_table(
        "run_progress",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("step_at", sa.Double(), nullable=False),
        sa.Column("lost", sa.BigInteger(), nullable=False),
        sa.Column("lost_at", sa.Double()),
        sa.Column("inexact", sa.Integer()),
        sa.Column("counted", sa.BigInteger(), nullable=False),
        sa.Column("counted_attempt", sa.Integer(), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_run_progress_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", name="pk_run_progress"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "waiting_days",
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("worker_s", sa.Double(), nullable=False),
        sa.Column("waited_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("day", "run", name="pk_waiting_days"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_waiting_days_run", "waiting_days", ["run"])


def downgrade() -> None:
    for table in ("waiting_days", "run_progress", "verdicts"):
        op.drop_table(table)
