"""All tables as they are declared, and the settings of columns that only Postgres has.

Nothing was released yet, so whoever changes the declared tables changes what this file creates, and
makes the database again. From release 1.0 on each change is a migration of its own, and this file
must spell out the tables of that release.
"""

from alembic import op

from paceline_backend.store.schema import metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_STEPS = ("worker_steps", "steps", "rounds", "step_rollups", "rank_rollups")


def upgrade() -> None:
    connection = op.get_bind()
    metadata.create_all(connection, checkfirst=False)
    if connection.dialect.name == "postgresql":
        _set_up_columns()


def _set_up_columns() -> None:
    # From statistics, Postgres takes a run that began after them to have no rows. All plans then
    # look alike to it, and it reads all rows of the run for each of some hundred steps. Without
    # statistics of these columns it takes a run to have a fixed part of the table.
    for table in _STEPS:
        for column in ("run", "step"):
            op.execute(f"ALTER TABLE {table} ALTER {column} SET STATISTICS 0")
    # Sizes of samples hardly compress, and to try that takes Postgres seconds for a large Hello.
    op.execute("ALTER TABLE hello_parts ALTER COLUMN data SET STORAGE EXTERNAL")
