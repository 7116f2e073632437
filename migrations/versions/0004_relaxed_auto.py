"""Whether `auto` may choose relaxed synchronisers."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    relaxed = sa.Column("relaxed", sa.Boolean(), server_default=sa.false(), nullable=False)
    op.add_column("autos", relaxed)


def downgrade() -> None:
    op.drop_column("autos", "relaxed")
