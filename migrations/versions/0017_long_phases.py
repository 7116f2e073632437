"""What each rank has been doing for long: the newest that it said."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "long_phases",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("since_s", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("heard_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_long_phases_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "rank", name="pk_long_phases"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("long_phases")
