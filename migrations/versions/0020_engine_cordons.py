"""Nodes of engines know what their engine calls the machine, and cordons whether it was told."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("nodes", "cordons"):
        for name in ("backend", "host"):
            op.add_column(table, sa.Column(name, sa.Text(), nullable=True))
    op.add_column("cordons", sa.Column("told_at", sa.Double(), nullable=True))
    op.add_column("cordons", sa.Column("refusal", sa.Text(), nullable=True))


def downgrade() -> None:
    for name in ("refusal", "told_at"):
        op.drop_column("cordons", name)
    for table in ("cordons", "nodes"):
        for name in ("host", "backend"):
            op.drop_column(table, name)
