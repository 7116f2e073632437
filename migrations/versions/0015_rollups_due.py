"""From which step on the roll-ups of some runs are due, in place of one note for all runs."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rollups_due",
        sa.Column("run", sa.BigInteger(), nullable=False, autoincrement=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_rollups_due_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", name="pk_rollups_due"),
        sqlite_with_rowid=False,
    )
    op.execute(
        "INSERT INTO rollups_due (run, step) SELECT key, 0 FROM runs WHERE NOT EXISTS "
        "(SELECT 1 FROM meta WHERE name = 'rollups' AND value = 'filled')"
    )
    op.execute("DELETE FROM meta WHERE name = 'rollups'")


def downgrade() -> None:
    # The release before fills in all that is missing, as it finds no note.
    op.drop_table("rollups_due")
