"""The first tables."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    _meta()
    _nodes()
    _runs()
    _switches()
    _worker_steps()
    _steps()
    _segments()
    _leases()


def downgrade() -> None:
    for table in (
        "leases",
        "segments",
        "steps",
        "worker_steps",
        "switches",
        "runs",
        "nodes",
        "meta",
    ):
        op.drop_table(table)


def _meta() -> None:
    op.create_table(
        "meta",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_meta"),
    )


def _nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("cores", sa.Integer(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("gpus", sa.JSON(), nullable=False),
        sa.Column("paceline", sa.Text(), nullable=False),
        sa.Column("registered_at", sa.Double(), nullable=False),
        sa.Column("heartbeat_at", sa.Double(), nullable=False),
        sa.Column("left", sa.Boolean(), nullable=False),
        sa.Column("runs", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_nodes"),
    )


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("key", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=True),
        sa.Column("script", sa.Text(), nullable=False),
        sa.Column("args", sa.JSON(), nullable=False),
        sa.Column("env", sa.JSON(), nullable=False),
        sa.Column("cwd", sa.Text(), nullable=True),
        sa.Column("nproc", sa.Integer(), nullable=False),
        sa.Column("max_restarts", sa.Integer(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("seen_at", sa.Double(), nullable=True),
        sa.Column("lost", sa.Boolean(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("dropped", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=True),
        sa.Column("world", sa.Integer(), nullable=True),
        sa.Column("samples", sa.BigInteger(), nullable=True),
        sa.Column("global_batch", sa.Integer(), nullable=True),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("loss_mean", sa.Text(), nullable=True),
        sa.Column("hello", sa.LargeBinary(), nullable=True),
        sa.PrimaryKeyConstraint("key", name="pk_runs"),
        sa.UniqueConstraint("id", name="uq_runs_id"),
    )
    op.create_index("ix_runs_state", "runs", ["state"], unique=False)


def _switches() -> None:
    op.create_table(
        "switches",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("requested_at", sa.Double(), nullable=False),
        sa.Column("requested_by", sa.Text(), nullable=False),
        sa.Column("effective_step", sa.BigInteger(), nullable=True),
        sa.Column("effective_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_switches_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "version", name="pk_switches"),
    )


def _worker_steps() -> None:
    op.create_table(
        "worker_steps",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("segment", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("load", sa.Double(), nullable=False),
        sa.Column("data_s", sa.Double(), nullable=False),
        sa.Column("compute_s", sa.Double(), nullable=False),
        sa.Column("sync_s", sa.Double(), nullable=False),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("ett_s", sa.Double(), nullable=True),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_worker_steps_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "step", "rank", name="pk_worker_steps"),
        sqlite_with_rowid=False,
    )


def _steps() -> None:
    op.create_table(
        "steps",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("segment", sa.BigInteger(), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("load_sum", sa.Double(), nullable=False),
        sa.Column("load_sq", sa.Double(), nullable=False),
        sa.Column("compute_min", sa.Double(), nullable=False),
        sa.Column("compute_max", sa.Double(), nullable=False),
        sa.Column("compute_sum", sa.Double(), nullable=False),
        sa.Column("sync_min", sa.Double(), nullable=False),
        sa.Column("step_s", sa.Double(), nullable=False),
        sa.Column("ett_error_sum", sa.Double(), nullable=True),
        sa.Column("ett_count", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_steps_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "step", name="pk_steps"),
        sqlite_with_rowid=False,
    )


def _segments() -> None:
    op.create_table(
        "segments",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.SmallInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("first_step", sa.BigInteger(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("moved", sa.Integer(), nullable=False),
        sa.Column("plan_s", sa.Double(), nullable=False),
        sa.Column("adopted_at", sa.Double(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_segments_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", "attempt", "seq", name="pk_segments"),
    )
    op.create_index("ix_segments_run_first_step", "segments", ["run", "first_step"], unique=False)
    op.create_index(
        "ix_segments_coasts",
        "segments",
        ["run", "first_step", "steps", "source"],
        unique=False,
        sqlite_where=sa.text("source = 'coast'"),
        postgresql_where=sa.text("source = 'coast'"),
    )


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("run", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["run"], ["runs.key"], name="fk_leases_run_runs", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("run", name="pk_leases"),
    )
