"""The tables, declared once for SQLite and Postgres. migrations/ must reproduce exactly this."""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    TypeDecorator,
    false,
    text,
)
from sqlalchemy import Text as AnyText
from sqlalchemy.engine import Dialect

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Text(TypeDecorator[str]):
    """Text from wherever: NUL, which Postgres takes in no text, becomes U+FFFD."""

    impl = AnyText
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """What the database gets."""
        return None if value is None else value.replace("\0", "\N{REPLACEMENT CHARACTER}")


BigKey = BigInteger().with_variant(Integer, "sqlite")  # SQLite autoincrements INTEGER only

# What is true of this database as a whole: "id" names the control plane.
meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("hostname", Text, nullable=False),
    Column("cores", Integer, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("gpus", JSON, nullable=False),
    Column("paceline", Text, nullable=False),
    Column("registered_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False),
    Column("left", Boolean, nullable=False),
    Column("runs", JSON, nullable=False),
)

runs = Table(
    "runs",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("id", Text, nullable=False, unique=True),  # public: in URLs, on the bus
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),  # pending starting running finished failed stopped
    Column("backend", Text, nullable=False),  # local simulated
    Column("node", Text),  # that launches it; NULL until one is chosen
    Column("script", Text, nullable=False),
    Column("args", JSON, nullable=False),
    Column("env", JSON, nullable=False),
    Column("cwd", Text),
    Column("nproc", Integer, nullable=False),
    Column("max_restarts", Integer, nullable=False),
    Column("policy", Text, nullable=False),  # in force or requested last
    Column("version", Integer, nullable=False),  # of the policy: +1 at each switch
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("seen_at", Double),  # when something of it was last stored, by this side's clock
    Column("lost", Boolean),  # its end is assumed from silence: a later message revives it
    Column("exit_code", Integer),
    Column("message", Text),
    Column("dropped", BigInteger, nullable=False),  # telemetry records lost to a full spool
    # From the leader's Hello; NULL before it.
    Column("attempt", Integer),
    Column("world", Integer),
    Column("samples", BigInteger),
    Column("global_batch", Integer),
    Column("seed", BigInteger),
    Column("loss_mean", Text),  # "samples" or "size"
    Column("hello", LargeBinary),  # the latest attempt's Hello, MessagePack
    Index("ix_runs_state", "state"),
)

switches = Table(
    "switches",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, primary_key=True),  # 0: the policy at the start
    Column("policy", Text, nullable=False),
    Column("parameters", JSON, nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("effective_step", BigInteger),  # first step planned by it
    Column("effective_at", Double),
)

# One row per rank and step; the primary key is the range that every query reads.
worker_steps = Table(
    "worker_steps",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("load", Double, nullable=False),
    Column("data_s", Double, nullable=False),
    Column("compute_s", Double, nullable=False),
    Column("sync_s", Double, nullable=False),
    Column("step_s", Double, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("ett_s", Double),
    Column("loss", Double),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("squares", Double, nullable=False, server_default="0"),  # Σ λ²
    Column("longest", Double, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)

# One row per step that all ranks reported: sums from which SE, step DIF and waste follow at once.
steps = Table(
    "steps",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("load_sum", Double, nullable=False),
    Column("load_sq", Double, nullable=False),  # Σ Λ_j²
    Column("compute_min", Double, nullable=False),
    Column("compute_max", Double, nullable=False),
    Column("compute_sum", Double, nullable=False),
    Column("sync_min", Double, nullable=False),  # communication: the last to arrive does not wait
    Column("step_s", Double, nullable=False),  # mean over ranks
    Column("ett_error_sum", Double),  # Σ |ETT − T| / T over ranks with an ETT
    Column("ett_count", Integer, nullable=False),
    Column("loss", Double),  # of the global batch: weighted as the gradients are
    Column("ended_at", Double, nullable=False),  # the last rank's
    sqlite_with_rowid=False,
)

segments = Table(
    "segments",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("policy", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("source", Text, nullable=False),  # controller, coast
    Column("moved", Integer, nullable=False),
    Column("plan_s", Double, nullable=False),
    Column("adopted_at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),  # the whole Segment, MessagePack
    Column("synchroniser", Text, nullable=False, server_default="allreduce"),  # its name
    Column("why", Text, nullable=False, server_default=""),  # why it was chosen
    Column("synchroniser_digest", Text, nullable=False, server_default=""),  # with its parameters
    # Why ranks all-reduced gradients in spite of the synchroniser; empty: they did not, or it is
    # not known.
    Column("fallback", Text, nullable=False, server_default=""),
    Index("ix_segments_run_first_step", "run", "first_step"),
    Index(  # where no controller planned, without the bodies in between
        "ix_segments_coasts",
        "run",
        "first_step",
        "steps",
        "source",
        sqlite_where=text("source = 'coast'"),
        postgresql_where=text("source = 'coast'"),
    ),
    Index(  # where policies choose synchronisers
        "ix_segments_choices",
        "run",
        "first_step",
        sqlite_where=text("why <> ''"),
        postgresql_where=text("why <> ''"),
    ),
    Index(  # where ranks fell back to the all-reduce
        "ix_segments_fallbacks",
        "run",
        "first_step",
        sqlite_where=text("fallback <> ''"),
        postgresql_where=text("fallback <> ''"),
    ),
)

# One row per round of a relaxed synchroniser, from the rank that tells of it.
rounds = Table(
    "rounds",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("segment", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("world", Integer, nullable=False),
    Column("contributors", Integer, nullable=False),
    Column("staleness", LargeBinary, nullable=False),  # counts by age, MessagePack
    Column("dropped", Integer, nullable=False),
    Column("waited_s", Double, nullable=False),
    Column("reduced_s", Double, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("copied_s", Double, nullable=False, server_default="0"),
    Index("ix_rounds_run_step", "run", "step"),
    sqlite_with_rowid=False,
)

# What an operator allows `auto` to do with a run. No row: nothing.
autos = Table(
    "autos",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("mode", Text, nullable=False),  # off recommend switch
    Column("requested_at", Double, nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("relaxed", Boolean, nullable=False, server_default=false()),  # it may choose such
)

# What each preset would take, from a run's telemetry up to a step.
forecasts = Table(
    "forecasts",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("made_at", Double, primary_key=True),
    Column("step", BigInteger, nullable=False),  # the last one that it rests on
    Column("body", JSON, nullable=False),
)

# What a simulated run simulates.
scenarios = Table(
    "scenarios",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("body", JSON, nullable=False),
)

# Which control plane plans a run. Only the owner of an unexpired lease proposes segments.
leases = Table(
    "leases",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
)
