"""Why a policy was switched."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("switches", sa.Column("why", sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    op.drop_column("switches", "why")
