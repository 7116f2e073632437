"""Sums over steps by the policy that planned them; switches that changed nothing."""

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None


_COPY = "run_days_before"
_SUMS = ("steps", "step_s_sum", "waited_s_sum", "se_sum", "se_count", "waste_sum", "waste_count")


def upgrade() -> None:
    version = sa.Column("version", sa.Integer(), nullable=False, autoincrement=False)
    # The worker divides the sums of runs whose steps are still there.
    newest = "(SELECT version FROM runs WHERE runs.key = run)"
    _replace([version], f"SELECT run, day, {newest}, {', '.join(_SUMS)} FROM {_COPY}")
    op.execute("UPDATE runs SET summed_at = NULL")
    unchanged = sa.Column("unchanged", sa.Boolean(), nullable=False, server_default=sa.false())
    op.add_column("effects", unchanged)


def downgrade() -> None:
    op.drop_column("effects", "unchanged")
    sums = ", ".join(f"sum({name})" for name in _SUMS)
    _replace([], f"SELECT run, day, {sums} FROM {_COPY} GROUP BY run, day")


def _replace(version: list[sa.Column], rows: str) -> None:
    """Make `run_days` anew: SQLite changes no primary key in place.

    Args:
        version: the column of the key beside run and day.
        rows: the query of the new table's rows, from the copy of the old one.
    """
    if op.get_bind().dialect.name == "postgresql":  # else a server may count after the copy
        op.execute("LOCK TABLE run_days IN ACCESS EXCLUSIVE MODE")
    op.execute(f"CREATE TABLE {_COPY} AS SELECT * FROM run_days")
    op.drop_table("run_days")
    run = sa.ForeignKey("runs.key", name="fk_run_days_run_runs", ondelete="CASCADE")
    op.create_table(
        "run_days",
        sa.Column("run", sa.BigInteger(), run, nullable=False),
        sa.Column("day", sa.Integer(), nullable=False, autoincrement=False),
        *version,
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("step_s_sum", sa.Double(), nullable=False),
        sa.Column("waited_s_sum", sa.Double(), nullable=False),
        sa.Column("se_sum", sa.Double(), nullable=False),
        sa.Column("se_count", sa.BigInteger(), nullable=False),
        sa.Column("waste_sum", sa.Double(), nullable=False),
        sa.Column("waste_count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run", "day", *(c.name for c in version), name="pk_run_days"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_run_days_day", "run_days", ["day"])
    op.execute(f"INSERT INTO run_days {rows}")
    op.drop_table(_COPY)
