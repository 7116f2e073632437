"""Create all declared tables, and set options of columns that only Postgres has.

Paceline has not been released yet, so a change of the declared tables changes what this file
creates, and its revision with it: a database with other tables is refused. From release 1.0 on,
each change is a migration of its own, and this file must spell out the tables of that release.
"""

from alembic import op

from paceline_backend.store.schema import metadata

# With statistics, Postgres assumes that a run that began after their collection has no rows. All
# plans then look alike to it, and it reads all rows of the run for each of some hundred steps.
# Without statistics of these columns, it assumes that a run has a fixed fraction of the table.
_NO_STATISTICS = (
    f"ALTER TABLE {table} ALTER {column} SET STATISTICS 0"
    for table in ("worker_steps", "steps", "rounds", "step_rollups", "rank_rollups")
    for column in ("run", "step")
)
POSTGRES = (
    *_NO_STATISTICS,
    # Sizes of samples hardly compress, and trying to compress a large Hello takes Postgres seconds.
    "ALTER TABLE hello_parts ALTER COLUMN data SET STORAGE EXTERNAL",
)

# A fingerprint of the tables and of `POSTGRES`. `tests/integration/store/test_migrations.py` checks
# it, and fails with the new one after a change.
revision = "ffc025b57aea"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    metadata.create_all(connection, checkfirst=False)
    if connection.dialect.name == "postgresql":
        for statement in POSTGRES:
            op.execute(statement)
