"""Which engines may have jobs of a run, also after the run went elsewhere or was deleted."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None

_ENDED = ("finished", "failed", "stopped")


def upgrade() -> None:
    marks = op.create_table(
        "engine_runs",
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("backend", "run", name="pk_engine_runs"),
        sqlite_with_rowid=False,
    )
    # Before, a run that had ended was marked by a token of its nodes that was not revoked.
    names = ("id", "state", "backend")
    runs = sa.table("runs", *map(sa.column, names), sa.column("backend_jobs", sa.JSON))
    tokens = sa.table("tokens", sa.column("run"), sa.column("revoked_at"))
    valid = (tokens.c.run.is_not(None), tokens.c.revoked_at.is_(None))
    left = runs.c.state.not_in(_ENDED) | runs.c.id.in_(sa.select(tokens.c.run).where(*valid))
    known = sa.select(runs.c.backend, runs.c.id).where(runs.c.backend_jobs.is_not(sa.null()), left)
    op.get_bind().execute(sa.insert(marks).from_select(["backend", "run"], known))


def downgrade() -> None:
    op.drop_table("engine_runs")
