"""Who acts for a run on its engine, apart from who plans it."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "engine_leases",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_engine_leases_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", name="pk_engine_leases"),
    )


def downgrade() -> None:
    op.drop_table("engine_leases")
