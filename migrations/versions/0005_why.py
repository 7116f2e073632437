"""Why a segment has its synchroniser."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    why = sa.Column("why", sa.Text(), server_default="", nullable=False)
    op.add_column("segments", why)


def downgrade() -> None:
    op.drop_column("segments", "why")
