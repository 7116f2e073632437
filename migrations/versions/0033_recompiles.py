"""How often torch.compile compiled code again in a rank's step."""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    column = sa.Column("recompiles", sa.Integer(), server_default="0", nullable=False)
    op.add_column("worker_steps", column)


def downgrade() -> None:
    op.drop_column("worker_steps", "recompiles")
