"""Runs on several nodes: how many, what each of them does, and where their launchers meet."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("nodes_min", "nodes_max"):
        column = sa.Column(name, sa.Integer(), server_default="1", nullable=False)
        op.add_column("runs", column)
    op.add_column("runs", sa.Column("rendezvous", sa.Text()))
    op.create_table(
        "run_nodes",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("first_attempt", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("exit_code", sa.Integer()),
        sa.Column("message", sa.Text()),
        sa.Column("address", sa.Text()),
        sa.Column("port", sa.Integer()),
        sa.Column("launched_at", sa.Double(), nullable=False),
        sa.Column("reported_at", sa.Double()),
        sa.Column("met", sa.Boolean(), nullable=False),
        sa.Column("lost", sa.Boolean(), nullable=False),
        sa.Column("leaving", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_run_nodes_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "node", name="pk_run_nodes"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("run_nodes")
    for name in ("rendezvous", "nodes_max", "nodes_min"):
        op.drop_column("runs", name)
