"""How many of a segment's moved samples went to another node."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("segments", sa.Column("across", sa.Integer(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("segments", "across")
