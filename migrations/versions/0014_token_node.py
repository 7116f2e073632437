"""Tokens of agents that are for one node, and the browser from which a link came."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("node", sa.Text(), nullable=True))
    op.add_column("tokens", sa.Column("via", sa.Text(), nullable=True))


def downgrade() -> None:
    # The release before knows no limit to a node: such a token would be good for all of them.
    tokens = sa.table("tokens", sa.column("node", sa.Text))
    op.get_bind().execute(sa.delete(tokens).where(tokens.c.node.is_not(None)))
    op.drop_column("tokens", "via")
    op.drop_column("tokens", "node")
