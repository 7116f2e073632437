"""The tables of alerts. migrations/ must reproduce exactly this."""

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

# What an admin changed of a rule. A rule without a row has its defaults.
alert_rules = Table(
    "alert_rules",
    metadata,
    Column("name", Text, primary_key=True),
    Column("enabled", Boolean, nullable=False),
    Column("threshold", Double, nullable=False),
    Column("raise_after_s", Double, nullable=False),
    Column("resolve_after_s", Double, nullable=False),
    Column("severity", Text, nullable=False),  # critical warning info
    Column("changed_at", Double, nullable=False),
    Column("changed_by", Text, nullable=False),
    sqlite_with_rowid=False,
)

# Rows outlast the runs that they are about: `run` is a public id, and no key.
alerts = Table(
    "alerts",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("rule", Text, nullable=False),
    Column("run", Text, nullable=False),  # "": it is about the control plane
    Column("severity", Text, nullable=False),
    Column("value", Double, nullable=False),
    Column("threshold", Double, nullable=False),
    Column("words", Text, nullable=False),
    # By the database's clock. NULL: not yet.
    Column("since", Double, nullable=False),  # the first look that saw the condition
    Column("raised_at", Double),
    Column("gone_at", Double),  # the first look that did not see it any more
    Column("resolved_at", Double),
    Column("acknowledged_at", Double),
    Column("acknowledged_by", Text),
    Column("acknowledged_why", Text),
    Index("ix_alerts_raised_at", "raised_at"),
    Index("ix_alerts_run", "run"),
    Index(  # of two workers at once, one raises
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
    Column("id", Text, nullable=False, unique=True),  # public; the secret is derived from it
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    Column("severity", Text, nullable=False),  # the least that it is told of
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
)

# What a webhook is told, once for each event of an alert.
alert_deliveries = Table(
    "alert_deliveries",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("webhook", BigInteger, ForeignKey("webhooks.key", ondelete="CASCADE"), nullable=False),
    Column("alert", BigInteger, ForeignKey("alerts.key", ondelete="CASCADE"), nullable=False),
    Column("event", Text, nullable=False),  # raised resolved
    Column("body", LargeBinary, nullable=False),  # exactly what is sent and signed
    Column("created_at", Double, nullable=False),
    Column("due_at", Double),  # of the next try; NULL: it was sent or given up
    Column("claimed_until", Double, nullable=False),  # by a worker that is sending it
    Column("tries", Integer, nullable=False),
    Column("tried_at", Double),
    Column("sent_at", Double),
    Column("status", Integer),  # HTTP status of the last try; NULL: there was no answer
    Column("error", Text),  # of the last try; NULL: it was taken
    Index("uq_alert_deliveries_event", "alert", "webhook", "event", unique=True),
    Index(
        "ix_alert_deliveries_due",
        "due_at",
        sqlite_where=text("due_at IS NOT NULL"),
        postgresql_where=text("due_at IS NOT NULL"),
    ),
    Index("ix_alert_deliveries_webhook_key", "webhook", "key"),
)

# Which worker does what only one of all workers may do, such as evaluating alerts.
duties = Table(
    "duties",
    metadata,
    Column("name", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
    sqlite_with_rowid=False,
)
