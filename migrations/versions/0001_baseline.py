"""Create all declared tables, and set options of columns that only Postgres has.

Paceline has not been released yet, so this file creates the tables that `store.schema` declares.
When a declared table changes, `revision` must change, too: `store.migrate` refuses a database with
another revision. From release 1.0 on, each change is a migration of its own, and this file must
spell out the tables of release 1.0.
"""

from alembic import op

from paceline_backend.store.schema import metadata

# With statistics, Postgres estimates that a run that began after their collection has no rows. All
# query plans then have about the same estimated cost, and Postgres can choose one that reads all
# rows of the run for each of about a hundred steps. Without statistics of these columns, Postgres
# estimates that a run has a fixed fraction of the table's rows.
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

# A fingerprint of the tables and of `POSTGRES`. If it is not up to date, the test
# `tests/integration/store/test_migrations.py` fails and shows the new fingerprint.
revision = "87ce73b6891d"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    connection = op.get_bind()
    metadata.create_all(connection, checkfirst=False)
    if connection.dialect.name == "postgresql":
        for statement in POSTGRES:
            op.execute(statement)
