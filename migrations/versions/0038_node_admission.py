"""Which token admitted a node, from what its keys are derived, and whether its run has it."""

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"
branch_labels = None
depends_on = None


def upgrade() -> None:
    joined = sa.Column("joined", sa.Boolean(), nullable=False, server_default=sa.false())
    op.add_column("nodes", joined)
    for name in ("token", "seed"):
        op.add_column("nodes", sa.Column(name, sa.Text(), nullable=True))


def downgrade() -> None:
    for name in ("seed", "token", "joined"):
        op.drop_column("nodes", name)
