"""Tags and notes of runs, their devices, and sums of their steps by day."""

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None


def _device(hello: bytes) -> str | None:
    """Of a stored Hello; None where it cannot be read."""
    try:
        message = msgspec.msgpack.decode(hello[2:] if hello[:1] == b"\xc1" else hello)
    except msgspec.DecodeError:
        return None
    device = message.get("device") if isinstance(message, dict) else None
    return device.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(device, str) else None


def upgrade() -> None:
    op.add_column("runs", sa.Column("device", sa.Text(), nullable=True))
    op.add_column("runs", sa.Column("note", sa.Text(), nullable=False, server_default=""))
    op.add_column("runs", sa.Column("summed_at", sa.Double(), nullable=True))
    runs = sa.table("runs", sa.column("key"), sa.column("hello"), sa.column("device"))
    connection = op.get_bind()
    keys = connection.scalars(sa.select(runs.c.key).where(runs.c.hello.is_not(None))).all()
    for key in keys:  # a Hello has a number per sample: one at a time
        mine = runs.c.key == key
        hello = connection.scalar(sa.select(runs.c.hello).where(mine))
        connection.execute(sa.update(runs).where(mine).values(device=_device(bytes(hello))))
    op.create_table(
        "run_tags",
        sa.Column(
            "run",
            sa.BigInteger(),
            sa.ForeignKey("runs.key", name="fk_run_tags_run_runs", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("tag", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "tag", name="pk_run_tags"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_run_tags_tag", "run_tags", ["tag"])
    op.create_table(
        "run_days",
        sa.Column(
            "run",
            sa.BigInteger(),
            sa.ForeignKey("runs.key", name="fk_run_days_run_runs", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("day", sa.Integer(), nullable=False, autoincrement=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("step_s_sum", sa.Double(), nullable=False),
        sa.Column("waited_s_sum", sa.Double(), nullable=False),
        sa.Column("se_sum", sa.Double(), nullable=False),
        sa.Column("se_count", sa.BigInteger(), nullable=False),
        sa.Column("waste_sum", sa.Double(), nullable=False),
        sa.Column("waste_count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run", "day", name="pk_run_days"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_run_days_day", "run_days", ["day"])


def downgrade() -> None:
    op.drop_table("run_days")
    op.drop_table("run_tags")
    for name in ("summed_at", "note", "device"):
        op.drop_column("runs", name)
