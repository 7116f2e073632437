"""Rounds of relaxed synchronisers."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    synchroniser = sa.Column("synchroniser", sa.Text(), server_default="allreduce", nullable=False)
    op.add_column("segments", synchroniser)
    op.create_table(
        "rounds",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("segment", sa.BigInteger(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("world", sa.Integer(), nullable=False),
        sa.Column("contributors", sa.Integer(), nullable=False),
        sa.Column("staleness", sa.LargeBinary(), nullable=False),
        sa.Column("dropped", sa.Integer(), nullable=False),
        sa.Column("waited_s", sa.Double(), nullable=False),
        sa.Column("reduced_s", sa.Double(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_rounds_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "attempt", "rank", "seq", name="pk_rounds"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_rounds_run_step", "rounds", ["run", "step"])


def downgrade() -> None:
    op.drop_table("rounds")
    op.drop_column("segments", "synchroniser")
