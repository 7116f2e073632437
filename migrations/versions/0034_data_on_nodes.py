"""Where data lives on nodes: what moved to them for an epoch, and what steps waited for."""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "data_epochs",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("planned_bytes", sa.BigInteger(), nullable=False),
        sa.Column("moved_bytes", sa.BigInteger(), nullable=False),
        sa.Column("moved", sa.BigInteger(), nullable=False),
        sa.Column("moved_s", sa.Double(), nullable=False),
        sa.Column("read_bytes", sa.BigInteger(), nullable=False),
        sa.Column("read", sa.BigInteger(), nullable=False),
        sa.Column("waits", sa.BigInteger(), nullable=False),
        sa.Column("waited_s", sa.Double(), nullable=False),
        sa.Column("held_bytes", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_data_epochs_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "attempt", "epoch", "rank", name="pk_data_epochs"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("data_epochs")
