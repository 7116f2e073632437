"""Which device each rank of an attempt has."""

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("devices", sa.JSON()))


def downgrade() -> None:
    op.drop_column("attempts", "devices")
