"""Tables of alerts. migrations/ must reproduce them exactly."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    Table,
    text,
)

from paceline_backend.store.schema import BigKey, Text, metadata

# Changes that an admin made to a rule. A rule without a row has its defaults.
alert_rules = Table(
    "alert_rules",
    metadata,
    Column("name", Text, primary_key=True),
    Column("enabled", Boolean, nullable=False),
    Column("threshold", Double, nullable=False),
    Column("raise_after_s", Double, nullable=False),
    Column("resolve_after_s", Double, nullable=False),
    # One of critical, warning, info.
    Column("severity", Text, nullable=False),
    Column("changed_at", Double, nullable=False),
    Column("changed_by", Text, nullable=False),
    sqlite_with_rowid=False,
)

# Rows outlive the runs that they are about, so `run` is a public id and not a foreign key.
alerts = Table(
    "alerts",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("rule", Text, nullable=False),
    # An empty string means that the alert is about the control plane.
    Column("run", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("value", Double, nullable=False),
    Column("threshold", Double, nullable=False),
    Column("words", Text, nullable=False),
    # Times are by the database's clock. NULL: not yet. `since` is the first evaluation that found
    # the condition true, `gone_at` the first one that no longer did.
    Column("since", Double, nullable=False),
    Column("raised_at", Double),
    Column("gone_at", Double),
    Column("resolved_at", Double),
    Column("acknowledged_at", Double),
    Column("acknowledged_by", Text),
    Column("acknowledged_why", Text),
    Index("ix_alerts_raised_at", "raised_at"),
    Index("ix_alerts_run", "run"),
    # Of two concurrent workers, only one can raise the alert.
    Index(
        "uq_alerts_open",
        "rule",
        "run",
        unique=True,
        sqlite_where=text("resolved_at IS NULL"),
        postgresql_where=text("resolved_at IS NULL"),
    ),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("key", BigKey, primary_key=True),
    # The id is public. The webhook's secret is derived from it.
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    # The lowest severity that the webhook receives.
    Column("severity", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
)

# Notifications, one per webhook and event of an alert.
alert_deliveries = Table(
    "alert_deliveries",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("webhook", BigInteger, ForeignKey("webhooks.key", ondelete="CASCADE"), nullable=False),
    Column("alert", BigInteger, ForeignKey("alerts.key", ondelete="CASCADE"), nullable=False),
    # `raised` or `resolved`.
    Column("event", Text, nullable=False),
    # Exactly the bytes that are sent and signed.
    Column("body", LargeBinary, nullable=False),
    Column("created_at", Double, nullable=False),
    # Time of the next attempt. NULL: it was sent or given up.
    Column("due_at", Double),
    # Until then the worker that is sending this row has claimed it.
    Column("claimed_until", Double, nullable=False),
    Column("tries", Integer, nullable=False),
    Column("tried_at", Double),
    Column("sent_at", Double),
    # HTTP status of the last attempt. NULL: there was no response.
    Column("status", Integer),
    # Error of the last attempt. NULL: it succeeded.
    Column("error", Text),
    Index("uq_alert_deliveries_event", "alert", "webhook", "event", unique=True),
    Index(
        "ix_alert_deliveries_due",
        "due_at",
        sqlite_where=text("due_at IS NOT NULL"),
        postgresql_where=text("due_at IS NOT NULL"),
    ),
    Index("ix_alert_deliveries_webhook_key", "webhook", "key"),
)

# Owners of work that only one worker process may do, such as evaluating alerts.
duties = Table(
    "duties",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
    sqlite_with_rowid=False,
)
