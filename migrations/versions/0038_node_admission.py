"""Which token admitted a node, and from what its keys are derived."""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("token", "seed"):
        op.add_column("nodes", sa.Column(name, sa.Text(), nullable=True))


def downgrade() -> None:
    for name in ("seed", "token"):
        op.drop_column("nodes", name)
