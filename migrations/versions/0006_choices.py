"""Which synchroniser a segment has, with its parameters; and where policies chose one."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    digest = sa.Column("synchroniser_digest", sa.Text(), server_default="", nullable=False)
    op.add_column("segments", digest)
    op.execute("UPDATE segments SET synchroniser_digest = synchroniser")
    op.create_index(
        "ix_segments_choices",
        "segments",
        ["run", "first_step"],
        unique=False,
        sqlite_where=sa.text("why <> ''"),
        postgresql_where=sa.text("why <> ''"),
    )


def downgrade() -> None:
    op.drop_index("ix_segments_choices", table_name="segments")
    op.drop_column("segments", "synchroniser_digest")
