"""What a batch's cost depends on, forecasts, `auto` and simulated runs."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("squares", "longest"):
        column = sa.Column(name, sa.Double(), server_default="0", nullable=False)
        op.add_column("worker_steps", column)
    _table(
        "autos",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("requested_by", sa.Text(), nullable=False),
        key=("run",),
    )
    _table(
        "forecasts",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        key=("run", "made_at"),
    )
    _table(
        "scenarios",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.JSON(), nullable=False),
        key=("run",),
    )


def downgrade() -> None:
    for table in ("scenarios", "forecasts", "autos"):
        op.drop_table(table)
    for name in ("longest", "squares"):
        op.drop_column("worker_steps", name)


def _table(name: str, *columns: sa.Column, key: tuple[str, ...]) -> None:
    op.create_table(
        name,
        *columns,
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name=f"fk_{name}_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint(*key, name=f"pk_{name}"),
    )
