"""Engines: what a run asks of one, its jobs there, and nodes and tokens that are for one run."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("tokens", sa.Column("run", sa.Text(), nullable=True))
    op.add_column("nodes", sa.Column("only_run", sa.Text(), nullable=True))
    for name in ("backend_options", "backend_jobs"):
        op.add_column("runs", sa.Column(name, sa.JSON(), nullable=True))


def downgrade() -> None:
    # The release before knows neither limits to a run nor runs that wait for an engine.
    tokens = sa.table("tokens", sa.column("run", sa.Text))
    op.get_bind().execute(sa.delete(tokens).where(tokens.c.run.is_not(None)))
    runs = sa.table("runs", sa.column("state", sa.Text))
    queued = sa.update(runs).where(runs.c.state == "queued").values(state="pending")
    op.get_bind().execute(queued)
    for name in ("backend_jobs", "backend_options"):
        op.drop_column("runs", name)
    op.drop_column("nodes", "only_run")
    op.drop_column("tokens", "run")
