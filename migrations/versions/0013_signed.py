"""Nodes and runs with users of the bus of their own; of a run's variables only names are kept."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_AT_ONCE = 1_000


def upgrade() -> None:
    for table in ("nodes", "runs"):
        column = sa.Column("signed", sa.Boolean(), server_default=sa.false(), nullable=False)
        op.add_column(table, column)
    _rewrite(lambda env: [*env])


def downgrade() -> None:
    # The release before expects an object; the values are gone.
    _rewrite(lambda names: dict.fromkeys(names, ""))
    for table in ("nodes", "runs"):
        op.drop_column(table, "signed")


def _rewrite(change) -> None:  # type: ignore[no-untyped-def]
    """Replaces `runs.env`, some rows at a time."""
    runs = sa.table("runs", sa.column("key", sa.BigInteger), sa.column("env", sa.JSON))
    connection = op.get_bind()
    last = -1
    while True:
        rows = connection.execute(
            sa.select(runs.c.key, runs.c.env)
            .where(runs.c.key > last)
            .order_by(runs.c.key)
            .limit(_AT_ONCE)
        ).all()
        if not rows:
            return
        last = rows[-1].key
        for row in rows:
            changed = change(row.env)
            if json.dumps(changed) != json.dumps(row.env):
                connection.execute(sa.update(runs).where(runs.c.key == row.key).values(env=changed))
