"""Prices of types of nodes; time and waiting by node, and by the price that held then."""

import sqlalchemy as sa
from alembic import op

revision = "0035"
down_revision = "0034"
branch_labels = None
depends_on = None

_COPY = "waiting_days_before"


def upgrade() -> None:
    op.add_column("nodes", sa.Column("type", sa.Text(), nullable=False, server_default=""))
    op.create_table(
        "node_prices",
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("amount", sa.Double(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("per", sa.Text(), nullable=False),
        sa.Column("set_at", sa.Double(), nullable=False),
        sa.Column("set_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("type", "since", name="pk_node_prices"),
        sqlite_with_rowid=False,
    )
    _replace(
        [
            sa.Column("node", sa.Text(), nullable=False),
            sa.Column("type", sa.Text(), nullable=False),
            sa.Column("since", sa.Double(), nullable=False),
        ],
        [
            sa.Column("node_s", sa.Double(), nullable=False),
            sa.Column("node_waited_s", sa.Double(), nullable=False),
        ],
        f"SELECT day, run, '', '', day * 86400.0, steps, worker_s, waited_s, 0, 0 FROM {_COPY}",
    )


def downgrade() -> None:
    # The nodes of a run have the same steps, and nothing reads how many there are.
    sums = "max(steps), sum(worker_s), sum(waited_s)"
    _replace([], [], f"SELECT day, run, {sums} FROM {_COPY} GROUP BY day, run")
    op.drop_table("node_prices")
    op.drop_column("nodes", "type")


def _replace(keys: list[sa.Column], more: list[sa.Column], rows: str) -> None:
    """Makes `waiting_days` anew: SQLite changes no primary key in place.

    Args:
        keys: columns of the key beside day and run.
        more: columns beside steps, worker_s and waited_s.
        rows: the query of the new table's rows, from the copy of the old one.
    """
    if op.get_bind().dialect.name == "postgresql":  # else a server may count after the copy
        op.execute("LOCK TABLE waiting_days IN ACCESS EXCLUSIVE MODE")
    op.execute(f"CREATE TABLE {_COPY} AS SELECT * FROM waiting_days")
    op.drop_table("waiting_days")
    op.create_table(
        "waiting_days",
        sa.Column("day", sa.Integer(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        *keys,
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("worker_s", sa.Double(), nullable=False),
        sa.Column("waited_s", sa.Double(), nullable=False),
        *more,
        sa.PrimaryKeyConstraint("day", "run", *(c.name for c in keys), name="pk_waiting_days"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_waiting_days_run", "waiting_days", ["run"])
    op.execute(f"INSERT INTO waiting_days {rows}")
    op.drop_table(_COPY)
