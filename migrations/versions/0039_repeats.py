"""Answers to requests with an Idempotency-Key, for clients that repeat one."""

import sqlalchemy as sa
from alembic import op

revision = "0039"
down_revision = "0038"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "repeats",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("answer", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("id", name="pk_repeats"),
    )
    op.create_index("ix_repeats_at", "repeats", ["at"])


def downgrade() -> None:
    op.drop_table("repeats")
