"""Why a segment was all-reduced in spite of its synchroniser."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    fallback = sa.Column("fallback", sa.Text(), server_default="", nullable=False)
    op.add_column("segments", fallback)
    only_these = sa.text("fallback <> ''")
    op.create_index(
        "ix_segments_fallbacks",
        "segments",
        ["run", "first_step"],
        sqlite_where=only_these,
        postgresql_where=only_these,
    )


def downgrade() -> None:
    op.drop_index("ix_segments_fallbacks", "segments")
    op.drop_column("segments", "fallback")
