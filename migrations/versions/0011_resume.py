"""Runs that go on: the attempt that a run goes on with, and where each attempt began."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("first_attempt", "attempts"):
        column = sa.Column(name, sa.Integer(), server_default="0", nullable=False)
        op.add_column("runs", column)
    op.create_table(
        "attempts",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("reached", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name=op.f("fk_attempts_run_runs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "attempt", name=op.f("pk_attempts")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("attempts")
    for name in ("attempts", "first_attempt"):
        op.drop_column("runs", name)
