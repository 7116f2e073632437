"""Postgres estimates rows of steps by the size of their tables, whatever their runs were so far.

From statistics, Postgres took a run that had begun after them to have no rows. All plans then
looked alike to it, and it read all rows of the run for each of some hundred steps: ingest stood
still. Without statistics of these columns it takes a run to have a fixed part of the table.
"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_TABLES = ("worker_steps", "steps", "rounds", "step_rollups", "rank_rollups")


def upgrade() -> None:
    # A column that gets its own type anew loses its statistics. Nothing is copied.
    _alter("ALTER {0} SET STATISTICS 0, ALTER {0} TYPE bigint")


def downgrade() -> None:
    _alter("ALTER {0} SET STATISTICS -1")


def _alter(how: str) -> None:
    if op.get_bind().dialect.name != "postgresql":
        return
    for table in _TABLES:
        changes = ", ".join(how.format(column) for column in ("run", "step"))
        op.execute(sa.text(f"ALTER TABLE {table} {changes}"))
