"""What switches changed is kept, also when the run is deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "effects",
        sa.Column("key", key, nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("nodes", sa.Integer()),
        sa.Column("ranks", sa.Integer()),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("noted_at", sa.Double(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("before_steps", sa.Integer(), nullable=False),
        sa.Column("after_steps", sa.Integer(), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("known", sa.Boolean(), nullable=False),
        sa.Column("saving", sa.Double()),
        sa.Column("low", sa.Double()),
        sa.Column("high", sa.Double()),
        sa.Column("forecast_saving", sa.Double()),
        sa.Column("forecast_low", sa.Double()),
        sa.Column("forecast_high", sa.Double()),
        sa.Column("replaced", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_effects"),
    )
    op.create_index("uq_effects_run", "effects", ["run", "version"], unique=True)
    op.create_index("ix_effects_at", "effects", ["at"])


def downgrade() -> None:
    op.drop_table("effects")
