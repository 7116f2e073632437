"""Slow nodes: cordons, spares, replacements, and which nodes verdicts named."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("spares", sa.Integer(), server_default="0", nullable=False))
    op.add_column("run_nodes", sa.Column("replaces", sa.Text()))
    for table, name in (("runs", "replace_slow_nodes"), ("run_nodes", "arrived")):
        column = sa.Column(name, sa.Boolean(), server_default=sa.false(), nullable=False)
        op.add_column(table, column)
    op.add_column("attempts", sa.Column("placement", sa.JSON()))
    _create_spares()
    _create_cordons()
    _create_slow_nodes()


def _create_spares() -> None:
    op.create_table(
        "spares",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_spares_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "node", name="pk_spares"),
        sqlite_with_rowid=False,
    )


def _create_cordons() -> None:
    key = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "cordons",
        sa.Column("key", key, nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("lifted_at", sa.Double()),
        sa.Column("lifted_by", sa.Text()),
        sa.Column("lifted_why", sa.Text()),
        sa.PrimaryKeyConstraint("key", name="pk_cordons"),
    )
    op.create_index("ix_cordons_node_key", "cordons", ["node", "key"])
    op.create_index(
        "uq_cordons_present",
        "cordons",
        ["node"],
        unique=True,
        sqlite_where=sa.text("lifted_at IS NULL"),
        postgresql_where=sa.text("lifted_at IS NULL"),
    )


def _create_slow_nodes() -> None:
    op.create_table(
        "slow_nodes",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("factor", sa.Double()),
        sa.Column("words", sa.Text(), nullable=False),
        sa.Column("ended_at", sa.Double()),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_slow_nodes_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "at", name="pk_slow_nodes"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_slow_nodes_node", "slow_nodes", ["node"])


def downgrade() -> None:
    for table in ("slow_nodes", "cordons", "spares"):
        op.drop_table(table)
    op.drop_column("attempts", "placement")
    for name in ("arrived", "replaces"):
        op.drop_column("run_nodes", name)
    for name in ("replace_slow_nodes", "spares"):
        op.drop_column("runs", name)
