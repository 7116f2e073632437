"""Restarts of runs that hang, and how fast nodes are."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("restart_hung_s", sa.Double(), nullable=True))
    op.add_column("runs", sa.Column("hang_ended", sa.Integer(), nullable=True))
    factor = sa.Column("join_check", sa.Double(), nullable=False, server_default="1.5")
    op.add_column("runs", factor)
    kinds = {"check": sa.JSON(), "checked_at": sa.Double(), "gpu_states": sa.JSON()}
    for name, kind in kinds.items():
        op.add_column("nodes", sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    for name in ("gpu_states", "checked_at", "check"):
        op.drop_column("nodes", name)
    for name in ("join_check", "hang_ended", "restart_hung_s"):
        op.drop_column("runs", name)
