"""What copying gradients from their device takes in a round."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    copied = sa.Column("copied_s", sa.Double(), server_default="0", nullable=False)
    op.add_column("rounds", copied)


def downgrade() -> None:
    op.drop_column("rounds", "copied_s")
