"""Alerts, their rules, webhooks and deliveries; and duties, which one worker does for all."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

KEY = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    op.create_table(
        "alert_rules",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("enabled", sa.Boolean(), nullable=False),
        sa.Column("threshold", sa.Double(), nullable=False),
        sa.Column("raise_after_s", sa.Double(), nullable=False),
        sa.Column("resolve_after_s", sa.Double(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("changed_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_alert_rules"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "alerts",
        sa.Column("key", KEY, nullable=False),
        sa.Column("rule", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("threshold", sa.Double(), nullable=False),
        sa.Column("words", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("raised_at", sa.Double()),
        sa.Column("gone_at", sa.Double()),
        sa.Column("resolved_at", sa.Double()),
        sa.Column("acknowledged_at", sa.Double()),
        sa.Column("acknowledged_by", sa.Text()),
        sa.Column("acknowledged_why", sa.Text()),
        sa.PrimaryKeyConstraint("key", name="pk_alerts"),
    )
    op.create_index("ix_alerts_raised_at", "alerts", ["raised_at"])
    op.create_index("ix_alerts_run", "alerts", ["run"])
    unresolved = sa.text("resolved_at IS NULL")
    op.create_index(
        "uq_alerts_open",
        "alerts",
        ["rule", "run"],
        unique=True,
        sqlite_where=unresolved,
        postgresql_where=unresolved,
    )
    _webhooks()
    op.create_table(
        "duties",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_duties"),
        sqlite_with_rowid=False,
    )


def _webhooks() -> None:
    op.create_table(
        "webhooks",
        sa.Column("key", KEY, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("key", name="pk_webhooks"),
        sa.UniqueConstraint("id", name="uq_webhooks_id"),
    )
    op.create_table(
        "alert_deliveries",
        sa.Column("key", KEY, nullable=False),
        sa.Column("webhook", sa.BigInteger(), nullable=False),
        sa.Column("alert", sa.BigInteger(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("due_at", sa.Double()),
        sa.Column("claimed_until", sa.Double(), nullable=False),
        sa.Column("tries", sa.Integer(), nullable=False),
        sa.Column("tried_at", sa.Double()),
        sa.Column("sent_at", sa.Double()),
        sa.Column("status", sa.Integer()),
        sa.Column("error", sa.Text()),
        sa.ForeignKeyConstraint(
            ["webhook"],
            ["webhooks.key"],
            name="fk_alert_deliveries_webhook_webhooks",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(
            ["alert"], ["alerts.key"], name="fk_alert_deliveries_alert_alerts", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("key", name="pk_alert_deliveries"),
    )
    op.create_index(
        "uq_alert_deliveries_event", "alert_deliveries", ["alert", "webhook", "event"], unique=True
    )
    due = sa.text("due_at IS NOT NULL")
    op.create_index(
        "ix_alert_deliveries_due",
        "alert_deliveries",
        ["due_at"],
        sqlite_where=due,
        postgresql_where=due,
    )
    op.create_index("ix_alert_deliveries_webhook_key", "alert_deliveries", ["webhook", "key"])


def downgrade() -> None:
    for table in ("duties", "alert_deliveries", "webhooks", "alerts", "alert_rules"):
        op.drop_table(table)
